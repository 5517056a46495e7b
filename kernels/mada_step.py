"""The two elementwise passes of a MADA step: hyper-gradient sums, and the step itself.

MADA (Ozkara et al., "MADA: Meta-Adaptive Optimizers Through Hyper-Gradient Descent", ICML 2024)
is one step ``S(state, g; h)`` with six scalar coefficients ``h`` shared by all parameters. Its
hyper-gradient needs six inner products over all parameters, and the step that follows needs the
coefficients which those products give: hence two passes over memory.

* :func:`hyper_gradient_sums` reads the buffers of step t and the next gradient (32 B an element in
  float32, about 60 flops) and returns ``sum(g_next * dD_t/dh)`` for each learned coefficient.
* :func:`lagged_step` reads the same buffers, writes the buffers after step t and the direction of
  step t + 1 (32 B in, 28 B out, about 50 flops).

The equations stand once, in :func:`inner_step` and :func:`direction_gradient`; every
implementation calls these two on its blocks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

Implementation = Literal["xla", "pallas"]
Scalar = Any  # a Python float (static: the code below specialises on it) or a traced scalar


class MadaHyperparams(NamedTuple):
    """The six coefficients h of MADA, or one value per coefficient of anything else.

    Attributes:
        beta1: decay of the first moment m.
        beta2: decay of the second moment v.
        beta3: weight and decay of the gradient difference (Adan); 0 switches it off.
        rho: share of v in the denominator; the rest is vbar (1: Adam, 0: AVGrad or AMSGrad).
        c: 1 for Adam's second moment, 0 for Yogi's.
        gamma: share of the adaptive direction; the rest is Lion's sign direction.
    """

    beta1: Any
    beta2: Any
    beta3: Any
    rho: Any
    c: Any
    gamma: Any


class Moments(NamedTuple):
    """The buffers that a step starts from; ``None`` where the coefficients never need one.

    Attributes:
        m: first moment.
        v: second moment.
        vbar: running average (AVGrad) or running maximum (AMSGrad) of v.
        n: moving average of the gradient difference (Adan).
        lion: Lion's moving average.
        gradient: the gradient of the step before.
    """

    m: Any = None
    v: Any = None
    vbar: Any = None
    n: Any = None
    lion: Any = None
    gradient: Any = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """The choices in the step that are no coefficients.

    Attributes:
        second_moment: vbar is the running average ("avg") or the running maximum ("max") of v.
        max_after_correction: with "max", take it of the bias-corrected v (as optax.amsgrad does).
        diff_bias_correction: divide n by 1 - beta3^t (as Adan's code does; MADA's does not).
        official: reproduce the authors' code: Lion's sign reads the buffer after its update, and
            vbar counts as a constant in the hyper-gradient.
    """

    second_moment: Literal["avg", "max"] = "avg"
    max_after_correction: bool = False
    diff_bias_correction: bool = False
    official: bool = False


class StepScalars(NamedTuple):
    """What one step knows besides its buffers, prepared once for all leaves.

    ``k`` holds the bias corrections 1 - beta^t for beta1, beta2, beta3 and ``dk`` their negative
    derivatives t beta^(t-1).
    """

    hyper: MadaHyperparams
    t: Scalar
    k: tuple[Scalar, Scalar, Scalar]
    dk: tuple[Scalar, Scalar, Scalar]
    eps: Scalar
    lion_b1: Scalar
    lion_b2: Scalar


def step_scalars(
    hyper: MadaHyperparams, count: jax.Array, eps: Scalar, lion_b1: Scalar, lion_b2: Scalar, dtype
) -> StepScalars:
    """Scalars of step number ``count`` (an integer, counted from 1), prepared in ``dtype``."""
    betas = (hyper.beta1, hyper.beta2, hyper.beta3)
    t = count.astype(dtype)
    k1, k2, k3 = ((1 - beta**count).astype(dtype) for beta in betas)
    dk1, dk2, dk3 = (t * (beta ** (count - 1)).astype(dtype) for beta in betas)
    return StepScalars(hyper, t, (k1, k2, k3), (dk1, dk2, dk3), eps, lion_b1, lion_b2)


def is_fixed_at(coefficient: Scalar, value: float) -> bool:
    """Whether a coefficient is a static number equal to ``value``."""
    return isinstance(coefficient, (int, float)) and coefficient == value


def inner_step(moments: Moments, g: jax.Array, s: StepScalars, rule: Rule):
    """One step S(moments, g; h), elementwise.

    Args:
        moments: the buffers before the step.
        g: the gradient of the step.
        s: scalars of the step.
        rule: choices that are no coefficients.

    Returns:
        The buffers after the step, and the direction D (the parameters move by ``-lr * D``).
    """
    h = s.hyper
    adaptive = sign = None
    if moments.m is not None:
        m = (1 - h.beta1) * g + h.beta1 * moments.m
        _, d, q = _second_moment_input(moments, g, h)
        v = (1 - h.beta2) * q + h.beta2 * moments.v
        n = None if moments.n is None else (1 - h.beta3) * d + h.beta3 * moments.n
        vbar = None if moments.vbar is None else _running(moments.vbar, v, s, rule)
        numerator, vhat = _corrected(m, v, vbar, n, s, rule)
        adaptive = numerator / (jnp.sqrt(vhat) + s.eps)
        moments = moments._replace(m=m, v=v, vbar=vbar, n=n)
    if moments.lion is not None:
        lion = (1 - s.lion_b2) * g + s.lion_b2 * moments.lion
        base = lion if rule.official else moments.lion
        sign = jnp.sign((1 - s.lion_b1) * g + s.lion_b1 * base)
        moments = moments._replace(lion=lion)
    if moments.gradient is not None:
        moments = moments._replace(gradient=g)
    if sign is None:
        return moments, adaptive
    if adaptive is None:
        return moments, sign
    return moments, h.gamma * adaptive + (1 - h.gamma) * sign


def direction_gradient(
    moments: Moments, g: jax.Array, s: StepScalars, rule: Rule, learned: Sequence[str]
) -> list[jax.Array]:
    """dD/dh of one step at fixed buffers and gradient, elementwise, in closed form.

    Args:
        moments: the buffers before the step.
        g: the gradient of the step.
        s: scalars of the step.
        rule: choices that are no coefficients.
        learned: names of the coefficients to differentiate by.

    Returns:
        One array per name, in the order of ``learned``. d sign = 0 everywhere, and the derivative
        through sqrt(vhat) counts as 0 where vhat = 0 (a coordinate that never had a gradient).
    """
    h, (k1, k2, k3), (dk1, dk2, dk3) = s.hyper, s.k, s.dk
    ghat, d, q = _second_moment_input(moments, g, h)
    after, _ = inner_step(moments, g, s, rule)
    m, v, vbar, n = after.m, after.v, after.vbar, after.n
    numerator, vhat = _corrected(m, v, vbar, n, s, rule)
    root = jnp.sqrt(vhat)
    a = 1 / (root + s.eps)  # d adaptive / d numerator
    live = vhat > 0
    r = jnp.where(live, -numerator * a * a / (2 * jnp.where(live, root, 1)), 0)  # d / d vhat

    # w = k2 * d vhat / d v: directly (rho), and through vbar.
    if vbar is None:
        w = 1.0
    elif rule.official:
        w = h.rho
    elif rule.second_moment == "avg":
        w = h.rho + (1 - h.rho) / s.t
    else:
        reached = v / k2 > moments.vbar if rule.max_after_correction else v > moments.vbar
        w = h.rho + (1 - h.rho) * reached
    sgn = jnp.sign(ghat * ghat - moments.v)
    dq_dghat = 2 * ghat * (h.c + (1 - h.c) * sgn)
    dv = r * (w / k2)  # d adaptive / d v
    corrected_after = rule.second_moment == "max" and rule.max_after_correction
    n_k = k3 if rule.diff_bias_correction else 1.0

    def beta1():
        return (h.gamma / k1) * a * (moments.m - g + m * (dk1 / k1))

    def beta2():
        through_k2 = w * v / k2 if corrected_after else vhat
        return h.gamma * (dv * (moments.v - q) + r * through_k2 * (dk2 / k2))

    def beta3():
        through_n = n / n_k + h.beta3 * (moments.n - d) / n_k
        if rule.diff_bias_correction:
            through_n = through_n + h.beta3 * n * (dk3 / (k3 * k3))
        return h.gamma * (a * through_n + dv * (1 - h.beta2) * dq_dghat * d)

    def rho():
        if corrected_after:
            return h.gamma * r * (v / k2 - vbar)
        return (h.gamma / k2) * r * (v - vbar)

    def c():
        return h.gamma * dv * (1 - h.beta2) * (ghat * ghat * (1 - sgn) - moments.v)

    def gamma():
        base = after.lion if rule.official else moments.lion
        return numerator * a - jnp.sign((1 - s.lion_b1) * g + s.lion_b1 * base)

    formulas = dict(beta1=beta1, beta2=beta2, beta3=beta3, rho=rho, c=c, gamma=gamma)
    return [formulas[name]() for name in learned]


def _second_moment_input(moments, g, h):
    """The weighted gradient ghat, the difference d, and q (Adam's and Yogi's), which v averages."""
    d = None if moments.gradient is None else g - moments.gradient
    ghat = g if d is None else g + h.beta3 * d
    square = ghat * ghat
    if is_fixed_at(h.c, 1):
        return ghat, d, square
    yogi = moments.v + square * jnp.sign(square - moments.v)
    return ghat, d, h.c * square + (1 - h.c) * yogi


def _running(vbar, v, s, rule):
    """Running average of v (AVGrad), or its running maximum (AMSGrad)."""
    if rule.second_moment == "avg":
        return vbar + (v - vbar) * (1 / s.t)  # a scalar division, not one per element
    return jnp.maximum(vbar, v / s.k[1] if rule.max_after_correction else v)


def _corrected(m, v, vbar, n, s, rule):
    """The numerator mhat + beta3 n and the mixed, bias-corrected second moment vhat."""
    h, (k1, k2, k3) = s.hyper, s.k
    numerator = m / k1
    if n is not None:
        numerator = numerator + h.beta3 * (n / k3 if rule.diff_bias_correction else n)
    if vbar is None:
        return numerator, v / k2
    if rule.second_moment == "max" and rule.max_after_correction:
        return numerator, h.rho * (v / k2) + (1 - h.rho) * vbar
    return numerator, (h.rho * v + (1 - h.rho) * vbar) / k2


def begin(moments: Moments, g: jax.Array, first: Scalar, rule: Rule) -> Moments:
    """Give the very first step its previous gradient: g itself, so that the difference is 0.

    The authors' code takes 0 as the previous gradient and starts n at g * g.
    """
    if moments.gradient is not None and not rule.official:
        moments = moments._replace(gradient=jnp.where(first, g, moments.gradient))
    if moments.n is not None and rule.official:
        moments = moments._replace(n=jnp.where(first, g * g, moments.n))
    return moments


def _redo(moments, g, s, rule, first):
    """The buffers after a step, from its inputs; as they are when there was no step yet."""
    after, _ = inner_step(moments, g, s, rule)
    kept = jax.tree.map(lambda old, new: jnp.where(first, old, new), moments, after)
    return kept._replace(gradient=after.gradient)  # before the first step it is 0 like the old one


def step(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    s: StepScalars,
    rule: Rule,
    first: jax.Array,
) -> tuple[list[Moments], list[jax.Array]]:
    """One step with no lag, for coefficients that are all frozen (XLA fuses it into one pass).

    Args:
        moments: the buffers before the step, one :class:`Moments` per leaf.
        gradients: the gradient of the step, one array per leaf.
        s: scalars of the step.
        rule: choices that are no coefficients.
        first: whether this is the first step.

    Returns:
        The buffers after the step (in the dtypes they came in) and the directions, per leaf.
    """
    dtype = s.t.dtype
    after, directions = [], []
    for old, g in zip(moments, gradients, strict=True):
        wide, g = jax.tree.map(lambda x: x.astype(dtype), (old, g))
        new, direction = inner_step(begin(wide, g, first, rule), g, s, rule)
        after.append(jax.tree.map(lambda x, like: x.astype(like.dtype), new, old))
        directions.append(direction)
    return after, directions


def redo(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    s: StepScalars,
    rule: Rule,
    first: jax.Array,
) -> list[Moments]:
    """The buffers after step t, from its inputs (arguments as :func:`lagged_step`)."""
    dtype = s.t.dtype
    wide = jax.tree.map(lambda x: x.astype(dtype), list(zip(moments, gradients, strict=True)))
    return [_redo(mo, g, s, rule, first) for mo, g in wide]


# ------------------------------------------------------------------------------- pass 1


def hyper_gradient_sums(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    s: StepScalars,
    rule: Rule,
    learned: tuple[str, ...],
    *,
    implementation: Implementation | None = None,
) -> list[jax.Array]:
    """sum(cotangent * dD/dh) over all leaves, for each learned coefficient.

    Args:
        moments: the buffers before the step, one :class:`Moments` per leaf.
        gradients: the gradient of the step, one array per leaf.
        cotangents: the gradient at the parameters after the step, one array per leaf.
        s: scalars of the step; their dtype is the dtype of the sums.
        rule: choices that are no coefficients.
        learned: names of the learned coefficients.
        implementation: "xla"; "pallas" (TPU and GPU, float32); or None: Pallas where the platform
            has it and XLA elsewhere, and XLA wherever the compiler partitions the leaves over a
            mesh (it cannot partition a Pallas call; inside ``shard_map`` it need not).

    Returns:
        One scalar per name, in the order of ``learned``.
    """
    dtype = s.t.dtype
    leaves = [
        jax.tree.map(lambda x: x.astype(dtype), leaf)
        for leaf in zip(moments, gradients, cotangents, strict=True)
        if leaf[1].size
    ]
    if not leaves or not learned:
        return [jnp.zeros((), dtype) for _ in learned]

    def over_leaves(worker):
        def run(s, leaves):
            parts = [_run(worker, s, leaf, rule, learned) for leaf in leaves]
            return [sum(column) for column in zip(*parts, strict=True)]

        return run

    return _choose(
        implementation,
        dtype,
        s,
        leaves,
        plain=over_leaves(_plain_sums),
        cpu=over_leaves(_blocked_sums),
        tpu=over_leaves(_tpu_sums),
        gpu=over_leaves(_gpu_sums),
    )


def _products(s, leaf, rule, learned):
    moments, g, cotangent = leaf
    return [cotangent * x for x in direction_gradient(moments, g, s, rule, learned)]


def _plain_sums(s, leaf, rule, learned):
    # The last axis first: two short sums round less than one long one.
    terms = _products(s, leaf, rule, learned)
    return [jnp.sum(jnp.sum(x, axis=-1) if x.ndim else x) for x in terms]


_BLOCK = 8192  # elements; eight float32 buffers and six accumulators of it fit a core's L2 cache


def _blocked_sums(s, leaf, rule, learned):
    """Sums through block-wide accumulators.

    XLA's CPU back end turns every full reduction into a scalar loop of its own that recomputes
    the whole step; elementwise accumulation over blocks is vectorised and computes it once.
    """
    flat = jax.tree.map(lambda x: x.ravel(), leaf)
    size = flat[1].size
    if size < 2 * _BLOCK:  # one scalar loop, but a single one
        terms = _products(s, flat, rule, learned)
        zeros = [jnp.zeros((), s.t.dtype)] * len(terms)
        return lax.reduce(
            terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (0,)
        )
    block = next((b for b in range(_BLOCK, _BLOCK // 2, -1) if size % b == 0), _BLOCK)

    def body(i, accumulators):
        start = i * block
        if size % block:  # the last block overlaps the one before it
            start = jnp.minimum(start, size - block)
        piece = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, block), flat)
        terms = _products(s, piece, rule, learned)
        if size % block:
            new = start + jnp.arange(block) >= i * block
            terms = [jnp.where(new, x, 0) for x in terms]
        return [a + x for a, x in zip(accumulators, terms, strict=True)]

    # Inside ``shard_map`` these have to vary over its axes as the terms will.
    zero = sum(jnp.zeros_like(x[:block]) for x in jax.tree.leaves(flat))
    accumulators = [zero for _ in learned]
    return [jnp.sum(a) for a in lax.fori_loop(0, pl.cdiv(size, block), body, accumulators)]


# ------------------------------------------------------------------------------- pass 2


def lagged_step(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    next_gradients: Sequence[jax.Array],
    s: StepScalars,
    s_next: StepScalars,
    rule: Rule,
    first: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[list[Moments], list[jax.Array]]:
    """Redo step t from its inputs and take step t + 1.

    Args:
        moments: the buffers before step t, one :class:`Moments` per leaf, in any float dtype.
        gradients: the gradient of step t.
        next_gradients: the gradient of step t + 1.
        s: scalars of step t.
        s_next: scalars of step t + 1, with the new coefficients.
        rule: choices that are no coefficients.
        first: true when there is no step t yet; the buffers are then kept as they are.
        implementation: as in :func:`hyper_gradient_sums`.

    Returns:
        The buffers after step t (in the dtypes they came in) and the directions of step t + 1 (in
        the dtype of the scalars), one per leaf.
    """
    dtype = s.t.dtype
    leaves = list(zip(moments, gradients, next_gradients, strict=True))

    def over_leaves(worker):
        def run(scalars, leaves):
            return [
                _run(worker, scalars, leaf, rule) if leaf[1].size else (leaf[0], leaf[2])
                for leaf in leaves
            ]

        return run

    plain = over_leaves(_lagged)
    results = _choose(
        implementation,
        dtype,
        (s, s_next, first.astype(dtype)),
        leaves,
        plain=plain,
        cpu=plain,
        tpu=over_leaves(_tpu_lagged),
        gpu=over_leaves(_gpu_lagged),
    )
    return [after for after, _ in results], [direction for _, direction in results]


def _lagged(scalars, leaf, rule):
    """Both steps on one leaf (or one block of it)."""
    s, s_next, first = scalars
    storage = leaf[0]
    moments, g, g_next = jax.tree.map(lambda x: x.astype(s.t.dtype), leaf)
    after = begin(_redo(moments, g, s, rule, first != 0), g_next, first != 0, rule)
    stored = jax.tree.map(lambda x, like: x.astype(like.dtype), after, storage)
    # A buffer stored in a shorter format must be what the next call finds.
    after = jax.tree.map(lambda x: x.astype(s.t.dtype), stored)
    _, direction = inner_step(after, g_next, s_next, rule)
    return stored, direction


# -------------------------------------------------------------------- choice of implementation


def _choose(implementation, dtype, scalars, leaves, *, plain, cpu, tpu, gpu):
    """Run the function of (scalars, leaves) that ``implementation`` stands for."""
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"implementation is {implementation!r}; expected 'xla', 'pallas' or None (automatic)"
        )
    if implementation == "pallas" and dtype != jnp.float32:
        raise ValueError(f"the Pallas kernels compute in float32, and these leaves need {dtype}")
    if implementation != "pallas" and any(map(_is_partitioned, jax.tree.leaves(leaves))):
        return plain(scalars, leaves)
    if implementation == "pallas":
        branches = dict(tpu=tpu, cuda=gpu)
    elif implementation is None and dtype == jnp.float32:
        branches = dict(tpu=tpu, cuda=gpu, cpu=cpu, default=plain)
    elif cpu is plain:
        return plain(scalars, leaves)
    else:
        branches = dict(cpu=cpu, default=plain)
    traced, skeleton = _split_static(scalars)

    def branch(run):
        return lambda traced, leaves: run(skeleton.merge(traced), leaves)

    return lax.platform_dependent(
        traced, leaves, **{name: branch(run) for name, run in branches.items()}
    )


def _is_partitioned(x: jax.Array) -> bool:
    """Whether the compiler divides this array over a mesh of several devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return False
    return any(kind != jax.sharding.AxisType.Manual for kind in mesh.axis_types)


class _Skeleton(NamedTuple):
    """A tree with its Python numbers in place and holes for its traced leaves; hashable."""

    treedef: Any
    numbers: tuple

    def merge(self, traced):
        rest = iter(traced)
        return jax.tree.unflatten(
            self.treedef, [next(rest) if x is None else x for x in self.numbers]
        )


def _split_static(tree):
    """The traced leaves of a tree, and the skeleton that holds its Python numbers."""
    flat, treedef = jax.tree.flatten(tree)
    numbers = tuple(x if isinstance(x, (int, float)) else None for x in flat)
    traced = [x for x, number in zip(flat, numbers, strict=True) if number is None]
    return traced, _Skeleton(treedef, numbers)


def _run(worker, scalars, leaf, *static):
    """worker(scalars, leaf, *static), traced once for all leaves of one shape."""
    traced, skeleton = _split_static(scalars)
    return _traced_once(worker, skeleton, static, traced, leaf)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _traced_once(worker, skeleton, static, traced, leaf):
    return worker(skeleton.merge(traced), leaf, *static)


# ------------------------------------------------------------------------------- Pallas
# One call per leaf. The scalars travel as one short vector: through scalar memory on a TPU.


def _vector(scalars):
    traced, skeleton = _split_static(scalars)
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


def _tpu_sums(s, leaf, rule, learned, interpret=False):
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

        for k, x in enumerate(_products(_unpack(scalar_ref, skeleton), pieces, rule, learned)):
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


def _tpu_lagged(scalars, leaf, rule, interpret=False):
    vector, skeleton = _vector(scalars)
    flat, treedef = jax.tree.flatten(jax.tree.map(_matrix, leaf))
    _, grid, spec = _tpu_blocks(flat[0].shape)
    outs, out_treedef = jax.tree.flatten(_directions_like(leaf))

    def kernel(scalar_ref, *refs):
        pieces = jax.tree.unflatten(treedef, [ref[...] for ref in refs[: len(flat)]])
        results = _lagged(_unpack(scalar_ref, skeleton), pieces, rule)
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


def _gpu_sums(s, leaf, rule, learned, interpret=False):
    vector, skeleton = _vector(s)
    flat, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.ravel(), leaf))
    size = flat[0].size
    programs = pl.cdiv(size, _GPU_BLOCK)

    def kernel(scalar_ref, *refs):
        *ins, out = refs
        pieces, _, inside = _gpu_blocks(ins, size)
        pieces = jax.tree.unflatten(treedef, pieces)
        for k, x in enumerate(_products(_unpack(scalar_ref, skeleton), pieces, rule, learned)):
            out[k, pl.program_id(0)] = jnp.sum(jnp.where(inside, x, 0))

    out = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=_outputs([((len(learned), programs), jnp.float32)], (vector, *flat))[0],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
    )(vector, *flat)
    return [jnp.sum(x) for x in out]


def _gpu_lagged(scalars, leaf, rule, interpret=False):
    vector, skeleton = _vector(scalars)
    flat, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.ravel(), leaf))
    size = flat[0].size
    outs, out_treedef = jax.tree.flatten(_directions_like(leaf))

    def kernel(scalar_ref, *refs):
        pieces, here, inside = _gpu_blocks(refs[: len(flat)], size)
        results = _lagged(_unpack(scalar_ref, skeleton), jax.tree.unflatten(treedef, pieces), rule)
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
