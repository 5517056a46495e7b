"""The two elementwise passes of a MADA step: hyper-gradient sums, and the step itself.

MADA (Ozkara et al., "MADA: Meta-Adaptive Optimizers Through Hyper-Gradient Descent", ICML 2024)
is one step ``S(state, g; h)`` with six scalar coefficients ``h`` shared by all parameters. Its
hyper-gradient needs six inner products over all parameters, and the step that follows needs the
coefficients which those products give: hence two passes over memory.

* :func:`hyper_gradient_sums` reads the buffers of step t and the next gradient (32 B an element in
  float32, about 60 flops) and returns ``sum(g_next * dD_t/dh)`` for each learned coefficient.
* :func:`lagged_step` reads the same buffers, writes the buffers after step t and the direction of
  step t + 1 (32 B in, 28 B out, about 50 flops).

The equations stand once, in ``equations.py`` (:func:`inner_step` and :func:`direction_gradient`);
every implementation calls these two on its blocks.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from icmljax.kernels.dispatch import Implementation, choose
from icmljax.kernels.mada_step.equations import (
    MadaHyperparams,
    Moments,
    Rule,
    StepScalars,
    begin,
    direction_gradient,
    inner_step,
    is_fixed_at,
    lagged,
    products,
    redo,
    step,
    step_scalars,
)
from icmljax.kernels.mada_step.pallas import gpu_lagged, gpu_sums, tpu_lagged, tpu_sums
from icmljax.kernels.mada_step.static import run_worker, split_static

__all__ = [
    "MadaHyperparams",
    "Moments",
    "Rule",
    "StepScalars",
    "begin",
    "direction_gradient",
    "hyper_gradient_sums",
    "inner_step",
    "is_fixed_at",
    "lagged_step",
    "redo",
    "step",
    "step_scalars",
]


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
            parts = [run_worker(worker, s, leaf, rule, learned) for leaf in leaves]
            return [sum(column) for column in zip(*parts, strict=True)]

        return run

    return _choose(
        implementation,
        dtype,
        s,
        leaves,
        plain=over_leaves(_plain_sums),
        cpu=over_leaves(_blocked_sums),
        tpu=over_leaves(tpu_sums),
        gpu=over_leaves(gpu_sums),
    )


def _plain_sums(s, leaf, rule, learned):
    # The last axis first: two short sums round less than one long one.
    terms = products(s, leaf, rule, learned)
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
        terms = products(s, flat, rule, learned)
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
        terms = products(s, piece, rule, learned)
        if size % block:
            new = start + jnp.arange(block) >= i * block
            terms = [jnp.where(new, x, 0) for x in terms]
        return [a + x for a, x in zip(accumulators, terms, strict=True)]

    # Inside ``shard_map`` these have to vary over its axes as the terms will.
    zero = sum(jnp.zeros_like(x[:block]) for x in jax.tree.leaves(flat))
    accumulators = [zero for _ in learned]
    return [jnp.sum(a) for a in lax.fori_loop(0, pl.cdiv(size, block), body, accumulators)]


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
                run_worker(worker, scalars, leaf, rule) if leaf[1].size else (leaf[0], leaf[2])
                for leaf in leaves
            ]

        return run

    results = _choose(
        implementation,
        dtype,
        (s, s_next, first.astype(dtype)),
        leaves,
        plain=over_leaves(lagged),
        tpu=over_leaves(tpu_lagged),
        gpu=over_leaves(gpu_lagged),
    )
    return [after for after, _ in results], [direction for _, direction in results]


def _choose(implementation, dtype, scalars, leaves, *, plain, tpu, gpu, cpu=None):
    """Runs the function of (scalars, leaves) that ``implementation`` stands for."""
    traced, skeleton = split_static(scalars)

    def branch(run):
        return run and (lambda traced, leaves: run(skeleton.merge(traced), leaves))

    return choose(
        implementation,
        dtype,
        (traced, leaves),
        plain=branch(plain),
        tpu=branch(tpu),
        gpu=branch(gpu),
        cpu=branch(cpu),
    )
