"""Initializers of sparse orthogonal layers, with and without their masks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, ScalarLike

from icmljax.initializers.eoi import rotations
from icmljax.initializers.eoi.rotations import Scheme, Target
from icmljax.sparsity.masks import switch_on

Axes = int | Sequence[int]
Split = Literal["more", "less"]
Tap = Literal["centre", "random"]
Initializer = Callable[..., Array]  # (key, shape, dtype) -> weights
MaskedInitializer = Callable[..., tuple[Array, Array]]  # (key, shape, dtype) -> weights, mask
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the axes of a weight are. All that are not named are the taps of a convolution's kernel.

    The defaults are those of flax and haiku: (in, out) and (height, width, in, out). Equinox and
    PyTorch keep (out, in) and (out, in, height, width): ``Layout(in_axis=1, out_axis=0)``.

    Attributes:
      in_axis: input axis or axes.
      out_axis: output axis or axes: ``in_axis=0, out_axis=(1, 2)`` for the projection
        (d_model, heads, head_dim) of an attention layer.
      batch_axis: axes over independent layers, as those that `flax.linen.scan` stacks.
      feature_group_count: groups of a convolution, each with its own block of output channels;
        the input axis holds the channels of one group.
    """

    in_axis: Axes = -2
    out_axis: Axes = -1
    batch_axis: Axes = ()
    feature_group_count: int = 1


class Block(NamedTuple):
    """The independent parts of one layer, brought to (taps, in, out)."""

    taps: int
    fan_in: int  # of a group
    fan_out: int  # of a group
    groups: int

    @property
    def rows(self) -> int:
        """Of the orthogonal matrix of a group."""
        return min(self.fan_in, self.fan_out)

    @property
    def cols(self) -> int:
        """At least as many: this axis is rotated."""
        return max(self.fan_in, self.fan_out)

    @property
    def size(self) -> int:
        """Number of weights in a layer."""
        return self.taps * self.fan_in * self.fan_out * self.groups


class Sizes(NamedTuple):
    """A shape, as its layout reads it."""

    order: tuple[int, ...]  # axes in the order batch, taps, in, out
    batch: tuple[int, ...]
    kernel: tuple[int, ...]
    block: Block


def read_shape(shape: Sequence[int], layout: Layout) -> Sizes:
    """Reads a shape.

    Raises:
      ValueError: it does not fit the layout.
    """
    shape = tuple(shape)
    what = f"a weight of shape {shape} with {layout}"
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(f"got {what}, expected at least two axes and no empty one")

    def axes(given: Axes) -> tuple[int, ...]:
        listed = (given,) if isinstance(given, int) else tuple(given)
        if any(not -len(shape) <= axis < len(shape) for axis in listed):
            raise ValueError(f"got {what}, expected axes in [-{len(shape)}, {len(shape)})")
        return tuple(axis % len(shape) for axis in listed)

    batch, ins, outs = axes(layout.batch_axis), axes(layout.in_axis), axes(layout.out_axis)
    named = batch + ins + outs
    if len(set(named)) < len(named) or not ins or not outs:
        raise ValueError(f"got {what}, expected every axis at most once, and an in and an out axis")
    taps = tuple(axis for axis in range(len(shape)) if axis not in named)

    def of(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in axes)

    if any(size % 2 == 0 for size in of(taps)):
        raise ValueError(
            f"got {what}: a kernel of even size has no centre tap; choose an odd size, or, where"
            " the stride is the size, name the kernel's axes as input axes"
        )
    fan_out, groups = math.prod(of(outs)), layout.feature_group_count
    if groups < 1 or fan_out % groups:
        raise ValueError(
            f"got {what}, expected a number of groups that divides the {fan_out} output channels"
        )
    block = Block(math.prod(of(taps)), math.prod(of(ins)), fan_out // groups, groups)
    return Sizes(batch + taps + ins + outs, of(batch), of(taps), block)


# ------------------------------------------------------------------------------ the paper's layers


def orthogonal_with_mask(
    density: float | np.ndarray,
    scale: ScalarLike = 1.0,
    *,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    scheme: Scheme = "iid",
    target: Target = "closest",
    angle_range: tuple[float, float] = (0.0, 2 * math.pi),
    dtype: DTypeLike = jnp.float32,
) -> MaskedInitializer:
    """Initializer of exactly orthogonal, sparse matrices, and their masks.

    All singular values are `scale`: rows or columns, whichever are fewer, are orthogonal.

    Args:
      density: fraction of non-zeros, in [1 / max(in, out), 1]; the result is at most
        ``1 / (2 max(in, out))`` away. An array, shaped like the batch axes, has one per layer.
      scale: gain; multiplies the matrix.
      in_axis: see `Layout`.
      out_axis: see `Layout`.
      batch_axis: see `Layout`; the layers are drawn independently.
      scheme: see `plan_rotations`.
      target: see `plan_rotations`.
      angle_range: see `plan_rotations`.
      dtype: of the result where the call gives none. What is narrower than float32 is computed in
        float32 and rounded at the end, and orthogonal to that precision only.

    Returns:
      ``init(key, shape, dtype) -> (weights, mask)``, which works under ``jit`` and ``vmap``. The
      mask, bool and of the same shape, is the support of the weights as planned: in a narrow dtype
      a weight may round to 0.

    Raises:
      ValueError: from `init`, where the shape, the density or the dtype is wrong.

    Reference:
      Nowak et al., ICML 2024, algorithm 1.
    """
    layout = Layout(in_axis, out_axis, batch_axis)
    law = _Law(scheme, target, angle_range, "centre")

    def init(key: PRNGKeyArray, shape: Sequence[int], dtype: DTypeLike = dtype):
        if read_shape(shape, layout).kernel:
            raise ValueError(
                f"a weight of shape {tuple(shape)} with {layout} has axes that are neither in, out"
                " nor batch; name them, or use delta_orthogonal for a convolution"
            )
        return _draw(key, shape, layout, density, scale, "less", law, dtype)

    return init


def delta_orthogonal_with_mask(
    density: float | np.ndarray,
    scale: ScalarLike = 1.0,
    *,
    split: Split = "more",
    tap: Tap = "centre",
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    feature_group_count: int = 1,
    scheme: Scheme = "iid",
    target: Target = "closest",
    angle_range: tuple[float, float] = (0.0, 2 * math.pi),
    dtype: DTypeLike = jnp.float32,
) -> MaskedInitializer:
    """Initializer of sparse convolutions that keep norms, and their masks.

    The centre tap is a sparse orthogonal matrix, the others are 0. At stride 1 and with padding
    "same", of zeros or circular, the layer is an isometry (its transpose is, where it has fewer
    output than input channels). A weight without kernel axes is a dense layer: it gets what
    `orthogonal_with_mask` gives it.

    Args:
      density: fraction of the whole kernel's weights that the mask lets train; at least
        ``1 / (K max(in, out))`` with K taps, in and out of one group. An array, shaped like the
        batch axes, has one per layer.
      scale: gain.
      split: the centre's share: a density d_H of its matrix of ``density`` ("less") or of
        ``min(K density, 1, sqrt(density))`` ("more"), but at least what orthogonality needs.
      tap: where the matrix of each group stands: at the centre, as in the paper, or at a random tap
        of its own. The latter shifts the group's images, which is an isometry with circular padding
        only, and lets sparse depthwise convolutions see more than the pixel in the middle.
      in_axis: see `Layout`.
      out_axis: see `Layout`.
      batch_axis: see `Layout`.
      feature_group_count: of a grouped convolution: one orthogonal block per group. A depthwise
        convolution gets +1 or -1 at the centre of each channel. (The authors' code takes the whole
        kernel for one matrix, which leaves most channels of a depthwise layer at 0.)
      scheme: see `plan_rotations`.
      target: see `plan_rotations`.
      angle_range: see `plan_rotations`.
      dtype: see `orthogonal_with_mask`.

    Returns:
      ``init(key, shape, dtype) -> (weights, mask)``. The mask holds the support of the centre tap
      and, drawn uniformly from the rest of the kernel, as many positions as the density has room
      for: ``round(density * size)`` in all. Their weights start at exactly 0, and are trainable.

    Raises:
      ValueError: from `init`, where the shape, the density or the dtype is wrong.

    Reference:
      Nowak et al., ICML 2024, section 3.3 and appendix; Xiao et al., ICML 2018, arXiv 1806.05393
      (delta-orthogonal).
    """
    if split not in ("more", "less"):
        raise ValueError(f"split is {split!r}, expected 'more' or 'less'")
    if tap not in ("centre", "random"):
        raise ValueError(f"tap is {tap!r}, expected 'centre' or 'random'")
    layout = Layout(in_axis, out_axis, batch_axis, feature_group_count)
    law = _Law(scheme, target, angle_range, tap)

    def init(key: PRNGKeyArray, shape: Sequence[int], dtype: DTypeLike = dtype):
        return _draw(key, shape, layout, density, scale, split, law, dtype)

    return init


def without_mask(factory: Callable[P, MaskedInitializer], doc: str) -> Callable[P, Initializer]:
    """The same factory, of initializers in the form of `jax.nn.initializers`."""

    @functools.wraps(factory)
    def weights_only(*args: P.args, **kwargs: P.kwargs) -> Initializer:
        init = factory(*args, **kwargs)
        return lambda *call, **keywords: init(*call, **keywords)[0]

    weights_only.__name__ = weights_only.__qualname__ = factory.__name__.removesuffix("_with_mask")
    weights_only.__doc__ = doc
    return weights_only


orthogonal = without_mask(
    orthogonal_with_mask,
    """Initializer of exactly orthogonal, sparse matrices: ``init(key, shape, dtype) -> weights``.

    The arguments are those of `orthogonal_with_mask`, which draws the same weights from the same
    key, and the mask to train them with.
    """,
)
delta_orthogonal = without_mask(
    delta_orthogonal_with_mask,
    """Initializer of sparse convolutions that keep norms: ``init(key, shape, dtype) -> weights``.

    The arguments are those of `delta_orthogonal_with_mask`, which draws the same weights from the
    same key, and the mask to train them with (it is more than where the weights are not 0).
    """,
)


def smallest_density(shape: Sequence[int], layout: Layout = Layout()) -> float:
    """The smallest density that an orthogonal layer of a shape can have.

    Raises:
      ValueError: the shape does not fit the layout.
    """
    block = read_shape(shape, layout).block
    return 1 / (block.taps * block.cols)


def centre_density(density: float, taps: int, split: Split) -> float:
    """Density d_H that the centre of a kernel of so many taps and that density is to have."""
    return density if split == "less" else min(density * taps, 1.0, math.sqrt(density))


# ------------------------------------------------------------------------------------ construction


class _Law(NamedTuple):
    """How rotations are drawn, see `plan_rotations`; and where the matrix stands."""

    scheme: Scheme
    target: Target
    angle_range: tuple[float, float]
    tap: Tap


def _draw(key, shape, layout: Layout, density, scale, split: Split, law: _Law, dtype):
    """Weights and mask of all layers of a weight."""
    compute = compute_dtype(dtype)
    rotations.check_law(law.scheme, law.target, law.angle_range)
    sizes = read_shape(shape, layout)
    block = sizes.block
    what = f"a weight of shape {tuple(shape)} with {layout}"
    rotations.check_density(density, smallest_density(shape, layout), what)
    rotations.check_size(block.rows, block.cols)
    if np.ndim(density) and np.shape(density) != sizes.batch:
        raise ValueError(
            f"got densities of shape {np.shape(density)} for {what}, expected one for all layers,"
            f" or the shape of its batch axes, {sizes.batch}"
        )
    goals = []
    for d in np.broadcast_to(np.asarray(density, np.float64), sizes.batch).ravel().tolist():
        centre = min(max(centre_density(d, block.taps, split), 1 / block.cols), 1.0)
        goal = rotations.goal_of(centre, block.rows, block.cols, law.scheme, law.target)
        goals.append((*goal, round(d * block.size)))
    exact = law.target == "exact"
    spec = _Spec(block, bool(sizes.kernel), law.tap, law.scheme, exact, law.angle_range, compute)
    per_layer = np.asarray(goals, np.int32)
    return draw_layers(_layer, spec, tuple(shape), sizes, jnp.dtype(dtype), key, scale, per_layer)


def compute_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype to compute weights in, at least float32.

    Raises:
      ValueError: weights cannot have that dtype.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {jnp.dtype(dtype)}, expected a floating-point type")
    return jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def draw_layers(layer, spec, shape, sizes: Sizes, dtype, key, scale, *per_layer):
    """Draws the independent layers of a weight and puts them in shape, in one program.

    Args:
      layer: ``(spec, key, *per_layer) -> (weights, mask)`` of shape (taps, in, out).
      spec: hashable.
      shape: of the weight.
      sizes: `read_shape` of it.
      dtype: of the result.
      key: PRNG key.
      scale: gain.
      *per_layer: arrays with an entry for each layer.

    Returns:
      Weights and mask.
    """
    one = functools.partial(layer, spec)
    if sizes.batch:
        weights, mask = jax.vmap(one)(jax.random.split(key, math.prod(sizes.batch)), *per_layer)
    else:
        weights, mask = one(key, *(x[0] for x in per_layer))
    weights = (weights * jnp.asarray(scale, weights.dtype)).astype(dtype)

    def in_shape(x):
        return x.reshape([shape[axis] for axis in sizes.order]).transpose(np.argsort(sizes.order))

    return in_shape(weights), in_shape(mask)


class _Spec(NamedTuple):
    block: Block
    has_kernel: bool  # else the mask is the support
    tap: Tap
    scheme: Scheme
    exact: bool
    angle_range: tuple[float, float]
    dtype: np.dtype


def _layer(spec: _Spec, key, goal):
    """One layer: weights and mask of shape (taps, in, out), see `_draw` for the goal."""

    # Loops of unequal lengths: one after the other is faster than side by side.
    @jax.custom_batching.sequential_vmap
    def draw(key, goal):
        taps, fan_in, fan_out, groups = spec.block
        matrix_key, mask_key = jax.random.split(key)
        if spec.block.cols == 1:
            matrices = jax.random.rademacher(matrix_key, (groups, 1, 1), spec.dtype)
            supports = jnp.ones((groups, 1, 1), bool)
        else:
            keys = matrix_key[None] if groups == 1 else jax.random.split(matrix_key, groups)
            one = functools.partial(_matrix, spec, rotations.Goal(*goal[:-1]))
            matrices, supports = jax.lax.map(one, keys)
        place = jnp.full(groups, taps // 2)
        if spec.tap == "random":
            place = jax.random.randint(jax.random.fold_in(key, 1), (groups,), 0, taps)
        weights, support = (
            jnp.zeros((taps, *x.shape), x.dtype)
            .at[place, jnp.arange(groups)]
            .set(x)
            .transpose(0, 2, 1, 3)
            .reshape(taps, fan_in, groups * fan_out)
            for x in (matrices, supports)
        )
        if not spec.has_kernel:
            return weights, support
        return weights, switch_on(mask_key, support, goal[-1])

    return draw(key, goal)


def _matrix(spec: _Spec, goal: rotations.Goal, key):
    """A sparse orthogonal matrix of shape (in, out) and its support."""
    rows, cols = spec.block.rows, spec.block.cols
    plan = rotations.draw_plan(
        key,
        rows,
        cols,
        goal,
        scheme=spec.scheme,
        exact=spec.exact,
        angle_range=spec.angle_range,
        dtype=spec.dtype,
    )
    tall = rotations.rotate_rows(plan, jnp.eye(cols, rows, dtype=spec.dtype))
    support = rotations.unpack_support(plan.support, rows)
    return (tall, support) if spec.block.fan_in == cols else (tall.T, support.T)
