"""Pruning at initialization: SNIP, GraSP and SynFlow.

Each gives every weight a score and keeps the highest of the whole network. Parameters are any
pytree; biases and norms (what ``filter_fn`` does not select) stay dense. Scores are computed in the
parameters' dtype: give float64 parameters for float64.

All keep exactly the number of weights asked for; equal scores go by position. The authors' code
compares with a threshold instead, and then keeps (or drops) all weights that equal it: where too
few have a gradient at all, SNIP so keeps the whole network.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from icmljax.sparsity.densities import Filter, check_density, is_weight, select
from icmljax.sparsity.masks import Stacked, as_masks, global_top_k, not_stacked

ApplyFn = Callable[[PyTree, Any], Array]


def _cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def snip(
    loss_fn: Callable[[PyTree, Any], Float[Array, ""]],
    params: PyTree,
    batch: PyTree,
    density: float,
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
) -> PyTree:
    """Keeps the weights whose removal changes the loss most, to first order.

    Args:
      loss_fn: ``(params, batch) -> scalar``.
      params: tree of arrays.
      batch: one batch.
      density: of the selected weights together, in (0, 1]; ``int(density * size)`` are kept.
      filter_fn: which leaves are made sparse; see `icmljax.sparsity.densities.layer_densities`.
      stacked: number of leading axes over layers, for ``filter_fn``.

    Returns:
      The mask tree. A layer may lose all its weights: `icmljax.sparsity.masks.report` shows it.

    Raises:
      ValueError: the density is out of range, nothing is selected, or scores are not finite.

    Reference:
      Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019
      (arXiv 1810.02340).
    """
    check_density(density)
    scores = snip_scores(loss_fn, params, batch, filter_fn=filter_fn, stacked=stacked)
    return as_masks(params, global_top_k(scores, int(density * _size(scores))))


def snip_scores(
    loss_fn: Callable[[PyTree, Any], Float[Array, ""]],
    params: PyTree,
    batch: PyTree,
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
) -> PyTree:
    """|w dL/dw| of each weight, None for other leaves; arguments as `snip`."""
    weights, rest, merge = _split(params, filter_fn, stacked)

    @jax.jit
    def score(weights, rest, batch):
        grads = jax.grad(lambda weights: loss_fn(merge(weights, rest), batch))(weights)
        return [jnp.abs(w * g) for w, g in zip(weights, grads, strict=True)]

    scores = score(weights, rest, batch)
    _check_finite("SNIP", _are_finite(scores))
    return merge(scores)


def grasp(
    apply_fn: ApplyFn,
    params: PyTree,
    batches: Iterable[tuple[Any, Int[Array, " batch"]]],
    density: float,
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
    loss: Callable[[Array, Array], Float[Array, ""]] = _cross_entropy,
    temperature: float = 200.0,
) -> PyTree:
    """Keeps the weights whose removal would most reduce the flow of the gradient.

    Args:
      apply_fn: ``(params, inputs) -> logits``.
      params: tree of arrays.
      batches: pairs ``(inputs, labels)``, gone through twice (an iterator is first read into
        memory). Their gradients are added up.
      density: of the selected weights together, in (0, 1]; ``int((1 - density) * size)`` are
        removed.
      filter_fn: which leaves are made sparse; see `icmljax.sparsity.densities.layer_densities`.
      stacked: number of leading axes over layers, for ``filter_fn``.
      loss: ``(logits, labels) -> scalar``; mean cross entropy with integer labels by default.
      temperature: the logits are divided by it.

    Returns:
      The mask tree.

    Raises:
      ValueError: the density is out of range, nothing is selected, there is no batch, or scores are
        not finite.

    Reference:
      Wang et al., "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020
      (arXiv 2002.07376). As in the authors' code the gradient of the second pass is that of all
      batches.
    """
    check_density(density)
    scores = grasp_scores(
        apply_fn,
        params,
        batches,
        filter_fn=filter_fn,
        stacked=stacked,
        loss=loss,
        temperature=temperature,
    )
    return as_masks(params, global_top_k(scores, _all_but(1 - density, _size(scores))))


def grasp_scores(
    apply_fn: ApplyFn,
    params: PyTree,
    batches: Iterable[tuple[Any, Int[Array, " batch"]]],
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
    loss: Callable[[Array, Array], Float[Array, ""]] = _cross_entropy,
    temperature: float = 200.0,
) -> PyTree:
    """-w (H g) of each weight, None for other leaves; arguments as `grasp`."""
    weights, rest, merge = _split(params, filter_fn, stacked)
    if iter(batches) is batches:
        batches = list(batches)

    @jax.jit
    def gradient(weights, rest, batch):
        inputs, labels = batch

        def cooled(weights):
            return loss(apply_fn(merge(weights, rest), inputs) / temperature, labels)

        return jax.grad(cooled)(weights)

    @jax.jit
    def product(weights, rest, batch, tangents):
        return jax.jvp(lambda weights: gradient(weights, rest, batch), (weights,), (tangents,))[1]

    def summed(function, *args):
        parts = (function(weights, rest, batch, *args) for batch in batches)
        total = next(parts, None)
        if total is None:
            raise ValueError("batches is empty; expected at least one pair (inputs, labels)")
        for part in parts:
            total = jax.tree.map(jnp.add, total, part)
        return total

    products = summed(product, summed(gradient))
    scores = [-w * hg for w, hg in zip(weights, products, strict=True)]
    _check_finite("GraSP", _are_finite(scores))
    return merge(scores)


def synflow(
    apply_fn: ApplyFn,
    params: PyTree,
    inputs_like: Any,
    density: float,
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
    rounds: int = 100,
) -> PyTree:
    """Prunes without data, in rounds, so that no layer is lost before it has to be.

    Args:
      apply_fn: ``(params, inputs) -> outputs``; batch normalization with fixed statistics.
      params: tree of arrays. Deep networks need float64, or `ValueError` tells of an overflow.
      inputs_like: array (or its shape) of the inputs, with their batch axis (one row is enough);
        the network is fed with ones.
      density: of the selected weights together after the last round, in (0, 1]; after round r of R
        it is ``density ** (r / R)``.
      filter_fn: which leaves are made sparse; see `icmljax.sparsity.densities.layer_densities`.
      stacked: number of leading axes over layers, for ``filter_fn``.
      rounds: >= 1.

    Returns:
      The mask tree.

    Raises:
      ValueError: an argument is out of range, nothing is selected, or scores are not finite.

    Reference:
      Tanaka et al., "Pruning Neural Networks without Any Data by Iteratively Conserving Synaptic
      Flow", NeurIPS 2020 (arXiv 2006.05467).
    """
    check_density(density)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected 1 or more")
    weights, rest, merge = _split(params, filter_fn, stacked)
    size = sum(w.size for w in weights)
    counts = [_all_but(1 - density ** ((r + 1) / rounds), size) for r in range(rounds)]

    @jax.jit
    def prune(weights, rest):
        def one_round(masks, k):
            live = [jnp.where(m, w, 0) for m, w in zip(masks, weights, strict=True)]
            scores = _flow(apply_fn, merge, live, rest, inputs_like)
            # Below all others: what is pruned stays so, even among scores of 0.
            ranked = [jnp.where(m, x, -1) for m, x in zip(masks, scores, strict=True)]
            return global_top_k(ranked, k), _are_finite(scores)

        masks = [jnp.ones(w.shape, bool) for w in weights]
        masks, finite = jax.lax.scan(one_round, masks, jnp.asarray(counts, jnp.int32))
        return masks, jnp.all(finite)

    masks, finite = prune(weights, rest)
    _check_finite("SynFlow", finite)
    return as_masks(params, merge(masks))


def synflow_scores(
    apply_fn: ApplyFn,
    params: PyTree,
    inputs_like: Any,
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
) -> PyTree:
    """|w dR/dw| of one round, R the sum of outputs of the network of |params|, for inputs of ones.

    Arguments as `synflow`; None for leaves not selected.
    """
    weights, rest, merge = _split(params, filter_fn, stacked)
    scores = jax.jit(lambda w, rest: _flow(apply_fn, merge, w, rest, inputs_like))(weights, rest)
    _check_finite("SynFlow", _are_finite(scores))
    return merge(scores)


# ----------------------------------------------------------------------------------- internals


def _split(params, filter_fn, stacked):
    """The selected leaves, all others, and the function that puts both together again."""
    selected, leaves, treedef = select(params, filter_fn, stacked)
    nothing = [None] * len(leaves)

    def merge(weights, rest=nothing):
        found = dict(zip(selected, weights, strict=True))
        return treedef.unflatten([found.get(index, leaf) for index, leaf in enumerate(rest)])

    rest = [None if index in selected else leaf for index, leaf in enumerate(leaves)]
    return [leaf for _, leaf in selected.values()], rest, merge


def _flow(apply_fn, merge, weights, rest, inputs_like):
    """Scores of SynFlow."""

    def outputs(weights):
        return jnp.sum(apply_fn(merge(weights, magnitudes), inputs))

    inputs = jnp.ones(inputs_like.shape, inputs_like.dtype)
    weights, magnitudes = jax.tree.map(jnp.abs, (weights, rest))
    return [jnp.abs(w * g) for w, g in zip(weights, jax.grad(outputs)(weights), strict=True)]


def _size(scores):
    return sum(x.size for x in jax.tree.leaves(scores))


def _all_but(fraction, size):
    """What is left when a fraction is removed, rounded as the authors' code does."""
    return size - int(fraction * size)


def _are_finite(scores):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in scores]))


def _check_finite(method, finite):
    if not isinstance(finite, jax.core.Tracer) and not finite:
        raise ValueError(
            f"{method} gives scores that are not finite: either inputs or parameters are not, or a "
            "deep network overflows, which float64 parameters (with jax_enable_x64) may prevent"
        )
