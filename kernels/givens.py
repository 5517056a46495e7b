"""Levels of disjoint Givens rotations, applied to the rows of a matrix.

A level rotates many pairs of rows at once, each row in one pair at most::

    row i <- cos a * row i + sin a * row j
    row j <- cos a * row j - sin a * row i

Written for all rows together it is ``matrix <- cos * matrix + sin * matrix[partner]`` with one
``partner``, ``cos`` and ``sin`` per row (the sine of row j carries the minus). The rotations of a
level commute, so levels give what one rotation after another gives, to the last bit.

Columns never meet. A tile of columns can therefore stay on chip for all levels: 8 n m bytes of
float32 (one read, one write) instead of 8 n m for each level, and 3 n m flops a level.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from icmljax.kernels.dispatch import Implementation, choose


def givens_levels(
    partner: Int[Array, "levels n"],
    cos: Float[Array, "levels n"],
    sin: Float[Array, "levels n"],
    matrix: Float[Array, "n m"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "n m"]:
    """Applies levels of disjoint rotations to the rows of a matrix, the first level first.

    The result of a column does not depend on which others stand beside it, nor that of a level on
    which call it is in: any split of columns or levels gives the same bits on the same platform.

    Args:
      partner: for each row the row that it is rotated with, in [0, n): ``partner[partner[i]] = i``
        in every level (not checked), and ``partner[i] = i`` where the row rests.
      cos: cosine of each row's angle; 1 where the row rests.
      sin: sine of each row's angle, of opposite signs in the two rows of a pair; 0 where the row
        rests.
      matrix: float32 or float64; cos and sin have its dtype.
      implementation: "xla"; "pallas" (TPU and GPU, float32); or None: Pallas where the platform
        has it and XLA elsewhere, and XLA wherever the compiler partitions the matrix over a mesh
        (without communication if it is divided by columns). A TPU leaves matrices of more than
        24576 rows to XLA. Only "xla" has forward-mode derivatives. The gradient by cos and sin
        holds the matrix once per level.

    Returns:
      The rotated matrix.

    Raises:
      ValueError: shapes or dtypes that do not fit together; or see
        :func:`icmljax.kernels.dispatch.choose`.
    """
    _check(partner, cos, sin, matrix)
    if not partner.shape[0] or not matrix.size:
        return matrix
    return _rotate(implementation, partner.astype(jnp.int32), cos, sin, matrix)


def _check(partner, cos, sin, matrix):
    if matrix.ndim != 2 or matrix.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"matrix is {matrix.dtype}{list(matrix.shape)}; expected two axes of float32 or float64"
        )
    n = matrix.shape[0]
    if partner.ndim != 2 or partner.shape[1] != n or not jnp.issubdtype(partner.dtype, jnp.integer):
        raise ValueError(
            f"partner is {partner.dtype}{list(partner.shape)}; expected integers [levels, {n}], "
            "one for each row of the matrix in each level"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != partner.shape or x.dtype != matrix.dtype:
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}; expected {matrix.dtype}"
                f"{list(partner.shape)}, the dtype of the matrix and the shape of partner"
            )


@functools.partial(jax.jit, static_argnums=0)
def _rotate(implementation, *arguments):
    arguments = _vary_alike(*arguments)
    run = functools.partial(_run, implementation)
    if implementation == "xla" or arguments[-1].dtype != jnp.float32:
        return run(*arguments)
    return with_gradient(run, *arguments)


def _vary_alike(*arrays):
    """Inside ``shard_map``, lets all arrays vary over the axes over which any of them does."""
    zero = sum((jnp.zeros_like(jnp.sum(x)) for x in arrays), start=jnp.zeros(()))
    return [x - zero.astype(x.dtype) for x in arrays]


def _run(implementation, *arguments):
    return choose(
        implementation,
        arguments[-1].dtype,
        arguments,
        plain=reference,
        cpu=tiled,
        # Mosaic batches no operand that stays outside vector memory: one matrix after the other.
        tpu=jax.custom_batching.sequential_vmap(lambda *x: tpu(*x)),
        gpu=gpu,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(run, partner, cos, sin, matrix):
    """run(partner, cos, sin, matrix) = givens_levels(...), with its gradient."""
    return run(partner, cos, sin, matrix)


def _forward(run, *arguments):
    return run(*arguments), arguments


def _backward(run, arguments, cotangent):
    partner, cos, sin, matrix = arguments
    # The transpose of a level is the level with the sines of the partners.
    sin_t = jnp.take_along_axis(sin, partner, axis=1)
    by_matrix = run(partner[::-1], cos[::-1], sin_t[::-1], cotangent)
    _, vjp = jax.vjp(lambda cos, sin: reference(partner, cos, sin, matrix), cos, sin)
    return None, *vjp(cotangent), by_matrix


with_gradient.defvjp(_forward, _backward)


# ----------------------------------------------------------------------------------------- XLA


def reference(partner, cos, sin, matrix):
    """What :func:`givens_levels` means: every level passes over the whole matrix."""

    def level(matrix, rotations):
        partner, cos, sin = (x[:, None] for x in rotations)
        # Added to each product, a zero that the compiler cannot know to be one (no partner is
        # negative) leaves it no choice between multiply-adds, which differ in the last bit.
        zero = jnp.where(partner < 0, 1, -0.0).astype(matrix.dtype)
        return (cos * matrix + zero) + (sin * matrix[partner[:, 0]] + zero), None

    return lax.scan(level, matrix, (partner, cos, sin))[0]


_CPU_TILE = 2**19  # elements; with its copy it fits, or nearly fits, a core's L2 cache
_CPU_COLUMNS = 128  # at least: each level of each tile costs some microseconds


def tiled(partner, cos, sin, matrix):
    """All levels on one tile of columns after the other."""
    n, m = matrix.shape
    width = max(_CPU_COLUMNS, _CPU_TILE // n)
    if m <= width:
        return reference(partner, cos, sin, matrix)

    def tile(i, out):
        start = i * width  # slices end with the matrix: the last tile overlaps the one before it
        columns = lax.dynamic_slice_in_dim(matrix, start, width, axis=1)
        columns = reference(partner, cos, sin, columns)
        return lax.dynamic_update_slice_in_dim(out, columns, start, axis=1)

    return lax.fori_loop(0, pl.cdiv(m, width), tile, matrix)


# -------------------------------------------------------------------------------------- Pallas


def _pairs(partner):
    """The smaller row of each pair, per level: listed first, in order; and how many there are."""
    n = partner.shape[1]
    rows = jnp.arange(n, dtype=jnp.int32)
    smaller = rows < partner
    first = jnp.sort(jnp.where(smaller, rows, n), axis=1)[:, : max(1, n // 2)]
    return first, jnp.sum(smaller, axis=1, dtype=jnp.int32)


def _like(matrix, shape):
    """An output: inside ``shard_map`` it varies over the axes over which the matrix does."""
    return jax.eval_shape(lambda x: jnp.broadcast_to(jnp.sum(x), shape), matrix)


_TPU_TILE_BYTES = 12 * 2**20  # of the 16 MB of vector memory that a kernel gets unasked
_LANES = 128


def tpu(partner, cos, sin, matrix, interpret=False):
    """Each tile of columns is copied to vector memory, rotated there pair by pair, and back.

    A tile has up to 1024 columns, folded so that one row of it is one register.
    """
    levels, n = partner.shape
    m = matrix.shape[1]
    rows = _TPU_TILE_BYTES // (n * _LANES * matrix.dtype.itemsize)
    if not rows:
        return reference(partner, cos, sin, matrix)
    sublanes = min(8, 1 << rows.bit_length() - 1, pl.next_power_of_2(pl.cdiv(m, _LANES)))
    tiles = pl.cdiv(m, sublanes * _LANES)
    padded = jnp.pad(matrix, ((0, 0), (0, tiles * sublanes * _LANES - m)))
    folded = padded.reshape(n, tiles, sublanes, _LANES).swapaxes(0, 1)
    first, count = _pairs(partner)

    def kernel(count, first, partner, cos, sin, matrix, out, tile):
        here, level = pl.program_id(0), pl.program_id(1)

        @pl.when(level == 0)
        def _():
            pltpu.sync_copy(matrix.at[here], tile)

        def rotate(k, _):
            i = first[0, 0, k]
            j = partner[0, 0, i]
            x, y = tile[i], tile[j]
            tile[i] = cos[0, 0, i] * x + sin[0, 0, i] * y
            tile[j] = cos[0, 0, j] * y + sin[0, 0, j] * x

        lax.fori_loop(0, count[0, 0, 0], rotate, None)

        @pl.when(level == levels - 1)
        def _():
            pltpu.sync_copy(tile, out.at[here])

    per_level = [x.reshape(levels, 1, -1) for x in (count, first, partner, cos, sin)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        kernel,
        grid=(tiles, levels),
        in_specs=[
            *(
                pl.BlockSpec(
                    (1, 1, x.shape[2]), lambda t, level: (level, 0, 0), memory_space=pltpu.SMEM
                )
                for x in per_level
            ),
            anywhere,
        ],
        out_specs=anywhere,
        out_shape=_like(matrix, folded.shape),
        scratch_shapes=[pltpu.VMEM((n, sublanes, _LANES), matrix.dtype)],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(*per_level, folded)
    return out.swapaxes(0, 1).reshape(n, -1)[:, :m]


_GPU_PAIRS, _GPU_COLUMNS = 128, 8  # of a block; 8 columns fill a sector of the cache


def gpu(partner, cos, sin, matrix, interpret=False):
    """Each program rotates a few columns in place, in global memory, through the caches.

    Rows meet across threads, so a barrier stands between levels.
    """
    levels, n = partner.shape
    m = matrix.shape[1]
    first, count = _pairs(partner)

    def kernel(count, first, partner, cos, sin, _, out):
        column = pl.program_id(0) * _GPU_COLUMNS + jnp.arange(_GPU_COLUMNS)[None, :]

        def level(at, _):
            pairs = count[at]

            def block(b, _):
                k = b * _GPU_PAIRS + jnp.arange(_GPU_PAIRS)
                live = k < pairs
                i = plt.load(first.at[at, k], mask=live, other=n)
                j = plt.load(partner.at[at, i], mask=live, other=n)

                def rotation(row):
                    return [
                        plt.load(x.at[at, row], mask=live, other=0)[:, None] for x in (cos, sin)
                    ]

                def place(row):
                    return out.at[row[:, None], column]

                inside = live[:, None] & (column < m)
                x, y = (plt.load(place(row), mask=inside, other=0) for row in (i, j))
                (cos_i, sin_i), (cos_j, sin_j) = rotation(i), rotation(j)
                plt.store(place(i), cos_i * x + sin_i * y, mask=inside)
                plt.store(place(j), cos_j * y + sin_j * x, mask=inside)

            lax.fori_loop(0, (pairs + (_GPU_PAIRS - 1)) // _GPU_PAIRS, block, None)
            if not interpret:  # which knows no barrier, and no threads
                plt.debug_barrier()

        lax.fori_loop(0, levels, level, None)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(m, _GPU_COLUMNS),),
        out_shape=_like(matrix, matrix.shape),
        input_output_aliases={5: 0},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
    )(count, first, partner, cos, sin, matrix)
