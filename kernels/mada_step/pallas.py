"""The two passes as Pallas kernels, for TPU and (Triton) GPU.

One call per leaf. The scalars travel as one short vector: through scalar memory on a TPU.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from icmljax.kernels.mada_step.equations import lagged, products
from icmljax.kernels.mada_step.static import split_static


def _vector(scalars):
    traced, skeleton = split_static(scalars)
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in traced]), skeleton


def _unpack(ref, skeleton):
    return skeleton.merge([ref[i] for i in range(skeleton.numbers.count(None))])


def _directions_like(leaf):
    """Shapes of what a step returns for a leaf."""
    return leaf[0], jax.ShapeDtypeStruct(leaf[1].shape, jnp.float32)


def _outputs(shapes, inputs):
    """The outputs of a kernel: inside ``shard_map`` they vary over its axes as any input does."""

    def fill(*inputs):
        x = sum(jnp.sum(x.astype(jnp.float32)) for x in inputs)
        return [jnp.full(shape, x, dtype) for shape, dtype in shapes]

    return jax.eval_shape(fill, *inputs)


def _matrix(x):
    """A leaf as (rows, columns) without moving data."""
    return x.reshape((-1, x.shape[-1])) if x.ndim >= 2 else x.reshape((1, -1))


def _tpu_blocks(shape):
    """Blocks of 0.5 MB in float32: 15 of them, twice (double buffering), fit the vector memory."""
    block = (min(shape[0], 256), min(shape[1], 512))
    grid = (pl.cdiv(shape[1], block[1]), pl.cdiv(shape[0], block[0]))
    return block, grid, pl.BlockSpec(block, lambda j, i: (i, j))


_SCALAR_MEMORY = pl.BlockSpec(memory_space=pltpu.SMEM)


def tpu_sums(s, leaf, rule, learned, interpret=False):
    """Pass 1 of one leaf: row blocks are summed into one row of accumulators per coefficient."""
    vector, skeleton = _vector(s)
    flat, treedef = jax.tree.flatten(jax.tree.map(_matrix, leaf))
    rows, columns = flat[0].shape
    block, grid, spec = _tpu_blocks((rows, columns))

    def kernel(scalar_ref, *refs):
        *ins, out = refs
        j, i = pl.program_id(0), pl.program_id(1)
        row = lax.broadcasted_iota(jnp.int32, block, 0) + i * block[0]
        column = lax.broadcasted_iota(jnp.int32, block, 1) + j * block[1]
        inside = (row < rows) & (column < columns)
        pieces = jax.tree.unflatten(treedef, [ref[...] for ref in ins])

        @pl.when(i == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        for k, x in enumerate(products(_unpack(scalar_ref, skeleton), pieces, rule, learned)):
            out[k : k + 1, :] += jnp.sum(jnp.where(inside, x, 0), axis=0, keepdims=True)

    out = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[_SCALAR_MEMORY, *[spec] * len(flat)],
        out_specs=pl.BlockSpec((8, block[1]), lambda j, i: (0, j)),
        out_shape=_outputs([((8, columns), jnp.float32)], (vector, *flat))[0],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(vector, *flat)
    return [jnp.sum(out[k]) for k in range(len(learned))]


def tpu_lagged(scalars, leaf, rule, interpret=False):
    """Pass 2 of one leaf."""
    vector, skeleton = _vector(scalars)
    flat, treedef = jax.tree.flatten(jax.tree.map(_matrix, leaf))
    _, grid, spec = _tpu_blocks(flat[0].shape)
    outs, out_treedef = jax.tree.flatten(_directions_like(leaf))

    def kernel(scalar_ref, *refs):
        pieces = jax.tree.unflatten(treedef, [ref[...] for ref in refs[: len(flat)]])
        results = lagged(_unpack(scalar_ref, skeleton), pieces, rule)
        for ref, x in zip(refs[len(flat) :], jax.tree.leaves(results), strict=True):
            ref[...] = x

    results = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[_SCALAR_MEMORY, *[spec] * len(flat)],
        out_specs=[spec] * len(outs),
        out_shape=_outputs([(flat[0].shape, x.dtype) for x in outs], (vector, *flat)),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )(vector, *flat)
    shaped = [x.reshape(like.shape) for x, like in zip(results, outs, strict=True)]
    return jax.tree.unflatten(out_treedef, shaped)


_GPU_BLOCK = 1024


def _gpu_blocks(refs, size):
    """This program's part of each flat buffer, its place, and which of it exists."""
    start = pl.program_id(0) * _GPU_BLOCK
    here = pl.ds(start, _GPU_BLOCK)
    inside = start + jnp.arange(_GPU_BLOCK) < size
    return [plt.load(ref.at[here], mask=inside, other=0) for ref in refs], here, inside


def gpu_sums(s, leaf, rule, learned, interpret=False):
    """Pass 1 of one leaf: every program writes its partial sums, XLA adds them."""
    vector, skeleton = _vector(s)
    flat, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.ravel(), leaf))
    size = flat[0].size
    programs = pl.cdiv(size, _GPU_BLOCK)

    def kernel(scalar_ref, *refs):
        *ins, out = refs
        pieces, _, inside = _gpu_blocks(ins, size)
        pieces = jax.tree.unflatten(treedef, pieces)
        for k, x in enumerate(products(_unpack(scalar_ref, skeleton), pieces, rule, learned)):
            out[k, pl.program_id(0)] = jnp.sum(jnp.where(inside, x, 0))

    out = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=_outputs([((len(learned), programs), jnp.float32)], (vector, *flat))[0],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
    )(vector, *flat)
    return [jnp.sum(x) for x in out]


def gpu_lagged(scalars, leaf, rule, interpret=False):
    """Pass 2 of one leaf."""
    vector, skeleton = _vector(scalars)
    flat, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.ravel(), leaf))
    size = flat[0].size
    outs, out_treedef = jax.tree.flatten(_directions_like(leaf))

    def kernel(scalar_ref, *refs):
        pieces, here, inside = _gpu_blocks(refs[: len(flat)], size)
        results = lagged(_unpack(scalar_ref, skeleton), jax.tree.unflatten(treedef, pieces), rule)
        for ref, x in zip(refs[len(flat) :], jax.tree.leaves(results), strict=True):
            plt.store(ref.at[here], x, mask=inside)

    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(size, _GPU_BLOCK),),
        out_shape=_outputs([((size,), x.dtype) for x in outs], (vector, *flat)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
    )(vector, *flat)
    shaped = [x.reshape(like.shape) for x, like in zip(results, outs, strict=True)]
    return jax.tree.unflatten(out_treedef, shaped)
