"""What Exact Orthogonal Initialization is compared with, and what it is judged by."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, ScalarLike

from icmljax.initializers.eoi.initializers import (
    Axes,
    Layout,
    MaskedInitializer,
    compute_dtype,
    draw_layers,
    read_shape,
)
from icmljax.initializers.eoi.trees import LayoutOf, channels_last, taps
from icmljax.sparsity.masks import as_masks, map_named, switch_on


def masked_orthogonal_with_mask(
    density: float | np.ndarray,
    scale: ScalarLike = 1.0,
    *,
    kernel: Literal["delta", "flat"] = "delta",
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    feature_group_count: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> MaskedInitializer:
    """Dense orthogonal weights (Haar) times a random mask: no longer orthogonal.

    With density 1 it is the dense orthogonal initializer.

    Args:
      density: exact fraction of the mask's positions, in [0, 1], uniformly drawn.
      scale: gain of the dense matrix.
      kernel: of a convolution: "delta" has the matrix at the centre tap, "flat" one matrix over
        taps and inputs (`torch.nn.init.orthogonal_`).
      in_axis: see `Layout`.
      out_axis: see `Layout`.
      batch_axis: see `Layout`.
      feature_group_count: see `Layout`.
      dtype: of the result where the call gives none.

    Returns:
      ``init(key, shape, dtype) -> (weights, mask)``.

    Raises:
      ValueError: from `init`, where the shape, the density or the dtype is wrong.
    """
    if kernel not in ("delta", "flat"):
        raise ValueError(f"kernel is {kernel!r}, expected 'delta' or 'flat'")
    layout = Layout(in_axis, out_axis, batch_axis, feature_group_count)

    def init(key: PRNGKeyArray, shape: Sequence[int], dtype: DTypeLike = dtype):
        compute = compute_dtype(dtype)
        values = np.asarray(density, np.float64)
        if not np.all((values >= 0) & (values <= 1)):
            raise ValueError(f"density is {density}, expected a number in [0, 1]")
        sizes = read_shape(shape, layout)
        count = np.rint(np.broadcast_to(values, sizes.batch) * sizes.block.size).astype(np.int32)
        spec = sizes.block, kernel, compute
        shape, dtype = tuple(shape), jnp.dtype(dtype)
        return draw_layers(_masked_layer, spec, shape, sizes, dtype, key, scale, count.ravel())

    return init


def _masked_layer(spec, key, count):
    (num_taps, fan_in, fan_out, groups), kernel, dtype = spec
    matrix_key, mask_key = jax.random.split(key)
    rows = fan_in * (num_taps if kernel == "flat" else 1)
    draw = functools.partial(_haar, rows=rows, cols=fan_out, dtype=dtype)
    matrix = jax.vmap(draw)(jax.random.split(matrix_key, groups))
    matrix = matrix.swapaxes(0, 1).reshape(-1, fan_in, groups * fan_out)
    weights = jnp.zeros((num_taps, fan_in, groups * fan_out), dtype)
    at = slice(None) if kernel == "flat" else slice(num_taps // 2, num_taps // 2 + 1)
    weights = weights.at[at].set(matrix)
    mask = switch_on(mask_key, jnp.zeros(weights.shape, bool), count)
    return jnp.where(mask, weights, 0), mask


def _haar(key, rows, cols, dtype):
    """A matrix with orthonormal rows or columns, whichever are fewer, of Haar's law.

    By Householder reflections of normal vectors (G. W. Stewart, SIAM J. Numer. Anal. 17 (1980)),
    without LAPACK: its QR, called for several weights in one program, may hang on a CPU.
    """
    if rows < cols:
        return _haar(key, cols, rows, dtype).T
    vector_key, sign_key = jax.random.split(key)
    normal = jax.random.normal(vector_key, (cols, rows), dtype)
    index = jnp.arange(rows)

    def reflect(matrix, step):
        x, i = step
        x = jnp.where(index >= i, x, 0)
        length = jnp.linalg.norm(x)
        v = x.at[i].add(jnp.where(x[i] < 0, -length, length))
        return matrix - (2 / jnp.sum(v**2)) * jnp.outer(v, v @ matrix), None

    start = jnp.eye(rows, cols, dtype=dtype)
    matrix, _ = jax.lax.scan(reflect, start, (normal, jnp.arange(cols)), reverse=True)
    return matrix * jax.random.rademacher(sign_key, (cols,), dtype)


def sao_with_mask(
    density: float | np.ndarray,
    scale: ScalarLike = 1.0,
    *,
    relu: bool = False,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    feature_group_count: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> MaskedInitializer:
    """Sparse orthogonal matrices of fixed degree, in the manner of SAO.

    Groups of rows with one support hold a small orthogonal block; supports of groups are disjoint,
    and drawn at random. Every row has ``degree = density * columns`` non-zeros (columns: the longer
    axis).

    Args:
      density: ``degree / columns`` for a whole degree; of stacked layers the same for all.
      scale: gain.
      relu: build ``[[W, -W], [-W, W]]``: what a ReLU makes 0 in one half it passes in the other, so
        that ``[relu(z), relu(-z)]`` becomes exactly ``[W z, -W z]``.
      in_axis: see `Layout`.
      out_axis: see `Layout`.
      batch_axis: see `Layout`.
      feature_group_count: only 1.
      dtype: of the result where the call gives none.

    Returns:
      ``init(key, shape, dtype) -> (weights, mask)``, for matrices only.

    Raises:
      ValueError: from `init`: a kernel, groups, a degree that is not whole, odd sizes with `relu`.

    Reference:
      K. Esguerra et al., "Sparsity-Aware Orthogonal initialization", 2023: a random stand-in for
      its Ramanujan graphs.
    """
    layout = Layout(in_axis, out_axis, batch_axis, feature_group_count)

    def init(key: PRNGKeyArray, shape: Sequence[int], dtype: DTypeLike = dtype):
        compute = compute_dtype(dtype)
        _, _, kernel, block = sizes = read_shape(shape, layout)
        if kernel or block.groups != 1:
            raise ValueError(f"SAO is for matrices, got a weight of shape {tuple(shape)}, {layout}")
        half = 2 if relu else 1
        if relu and (block.rows % 2 or block.cols % 2):
            raise ValueError(f"relu needs even sizes, got a weight of shape {tuple(shape)}")
        rows, cols = block.rows // half, block.cols // half
        degrees = np.unique(np.asarray(density, np.float64)) * cols
        degree = round(float(degrees[0]))
        if len(degrees) > 1 or not 1 <= degree <= cols or abs(degree - degrees[0]) > 1e-6:
            raise ValueError(
                f"density {density} of a weight of shape {tuple(shape)} is no whole degree:"
                f" expected a multiple of 1/{cols} in (0, 1], the same for all layers"
            )
        if _group_size(rows, cols, degree) is None:
            raise ValueError(
                f"{rows} rows of degree {degree} need groups with disjoint supports: {cols} columns"
                " are too few; choose a degree that divides their number"
            )
        spec = block, degree, relu, compute
        return draw_layers(_sao_layer, spec, tuple(shape), sizes, jnp.dtype(dtype), key, scale)

    return init


def _group_size(rows, cols, degree):
    """The smallest number of rows with one support at which all supports have room."""
    sizes = (size for size in range(1, degree + 1) if -(-rows // size) * degree <= cols)
    return next(sizes, None)


def _sao_layer(spec, key):
    block, degree, relu, dtype = spec
    half = 2 if relu else 1
    matrix, support = _blocks_of_one_support(
        key, block.rows // half, block.cols // half, degree, dtype
    )
    if relu:
        matrix = jnp.block([[matrix, -matrix], [-matrix, matrix]])
        support = jnp.tile(support, (2, 2))
    if block.fan_in == block.cols:
        matrix, support = matrix.T, support.T
    return matrix[None], support[None]


def _blocks_of_one_support(key, rows, cols, degree, dtype):
    """Rows in groups as large as disjoint supports allow, both in random order."""
    per_group = _group_size(rows, cols, degree)
    groups = -(-rows // per_group)
    row_key, column_key, block_key = jax.random.split(key, 3)
    draw = functools.partial(_haar, rows=per_group, cols=degree, dtype=dtype)
    small = jax.vmap(draw)(jax.random.split(block_key, groups))
    row = jnp.arange(groups * per_group).reshape(groups, per_group, 1)
    column = jnp.arange(groups * degree).reshape(groups, 1, degree)
    matrix = jnp.zeros((groups * per_group, cols), dtype).at[row, column].set(small)[:rows]
    support = jnp.zeros(matrix.shape, bool).at[row, column].set(True, mode="drop")
    order = jax.random.permutation(row_key, rows), jax.random.permutation(column_key, cols)
    return tuple(x[order[0]][:, order[1]] for x in (matrix, support))


def approximate_isometry(
    params: PyTree,
    masks: PyTree,
    *,
    sigma_w: float = 1.0,
    steps: int = 10_000,
    lr: float = 0.1,
    layout_of: LayoutOf = channels_last,
) -> PyTree:
    """Optimises masked weights towards isometry, by gradient descent on the whole network.

    Minimises ``sum_l || C_l C_l^T - sigma_w^2 I ||_F`` with ``C_l`` the masked weight of layer l as
    a matrix (out, taps x in), or the Gram matrix of its columns where they are fewer.

    Args:
      params: tree of parameters.
      masks: tree of masks, see `icmljax.sparsity.masks`; layers whose mask is a scalar stay as they
        are.
      sigma_w: gain.
      steps: of gradient descent.
      lr: its learning rate.
      layout_of: see `reinit_tree`.

    Returns:
      The parameters; where a mask is off they are 0.

    Raises:
      ValueError: masks do not fit the parameters; names the parameter.

    Reference:
      Lee et al., "A Signal Propagation Perspective for Pruning Neural Networks at Initialization",
      ICLR 2020; the norm is not squared, as in the code of Nowak et al.
    """

    def optimised(name, leaf, mask):
        if mask.ndim == 0:
            return leaf
        return _descend(layout_of(name, leaf), steps, leaf, mask, sigma_w, lr)

    return map_named(optimised, params, as_masks(params, masks), "masks")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _descend(layout, steps, weight, mask, sigma_w, lr):
    """The part of one layer: no other layer's gradient depends on it."""

    def loss(weight):
        parts = taps(jnp.where(mask, weight, 0), layout)
        c = parts.reshape((*parts.shape[:2], -1, parts.shape[-1]))
        gram = c.mT @ c if c.shape[-2] >= c.shape[-1] else c @ c.mT
        error = gram - sigma_w**2 * jnp.eye(gram.shape[-1], dtype=gram.dtype)
        return jnp.sum(optax.safe_norm(error, 0.0, axis=(-2, -1)))

    weight = jax.lax.fori_loop(0, steps, lambda _, w: w - lr * jax.grad(loss)(w), weight)
    return jnp.where(mask, weight, 0)


def jacobian_spectrum(
    apply_fn: Callable[[PyTree, Array], Array], params: PyTree, inputs: Float[Array, "batch ..."]
) -> Float[Array, "batch count"]:
    """Singular values of the Jacobian of a network's output by its input, at each input.

    Args:
      apply_fn: ``(params, inputs) -> outputs``, both with a leading batch axis.
      params: its parameters.
      inputs: where to take the Jacobian.

    Returns:
      The singular values of each (out, in) Jacobian, in descending order; as many as the smaller
      of both numbers.

    Reference:
      Pennington et al., "Resurrecting the sigmoid in deep learning through dynamical isometry",
      NeurIPS 2017.
    """

    def single(x):
        return jnp.ravel(apply_fn(params, x[None])[0])

    outputs = jax.eval_shape(single, inputs[0]).size
    jacobian_of = jax.jacrev if outputs <= inputs[0].size else jax.jacfwd
    jacobians = jax.vmap(jacobian_of(single))(inputs).reshape(len(inputs), outputs, -1)
    return jnp.linalg.svd(jacobians, compute_uv=False)
