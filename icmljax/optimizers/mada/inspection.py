"""Look into a state that contains MADA: coefficients, hyper-gradient, final optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from icmljax.kernels import mada_step
from icmljax.kernels.mada_step import MadaHyperparams, Moments
from icmljax.optimizers.mada.aliases import mada
from icmljax.optimizers.mada.transform import (
    NAMES,
    MadaState,
    flatten_like,
    last_step,
    mask_like,
    per_leaf,
    per_tree,
    weighted_sums,
)


def hyperparams(opt_state: Any) -> MadaHyperparams | dict[str, MadaHyperparams]:
    """The coefficients that the last update used.

    Args:
      opt_state: any optimizer state that contains one or more :class:`MadaState`.

    Returns:
      The coefficients; with several states (``optax.multi_transform``), by their path.

    Raises:
      ValueError: there is none.
    """
    return _one_or_all({path: state.hyper for path, state in _find(opt_state).items()})


def hyper_gradient(opt_state: Any, grads: Any) -> MadaHyperparams | dict[str, MadaHyperparams]:
    """-lr <grads, dD/dh>: the derivative by h of the loss after the last update.

    Args:
      opt_state: any optimizer state that contains one or more :class:`MadaState`.
      grads: gradient of the loss at the present parameters, of the parameters' tree.

    Returns:
      One scalar per coefficient (0 for frozen ones), neither clipped nor normalised; with
      several states, by their path. All 0 before the first update.

    Raises:
      ValueError: there is no such state, or the trees differ.
    """
    result = {}
    for path, state in _find(opt_state).items():
        found = dict.fromkeys(NAMES, jnp.zeros_like(state.learning_rate))
        if state.settings.learned:
            own = mask_like(grads, state.gradient)
            cotangents, _ = flatten_like(own, state, "grads")
            gradients, treedef = jax.tree.flatten(state.gradient)
            moments = per_leaf(state.moments, treedef)
            last = last_step(state)
            sums = weighted_sums(state, last, moments, gradients, cotangents, None, None)
            found |= {name: jnp.where(state.count > 0, x, 0) for name, x in sums.items()}
        result[path] = MadaHyperparams(**found)
    return _one_or_all(result)


def freeze(
    opt_state: Any, learning_rate: optax.ScalarOrSchedule, *, restart: bool = False
) -> tuple[optax.GradientTransformationExtraArgs, optax.OptState]:
    """The static optimizer with the coefficients that were learned ("final state").

    Args:
      opt_state: a state that contains exactly one :class:`MadaState`, with concrete values.
      learning_rate: a number or a schedule, counted from the restart or from the steps taken.
      restart: start from empty buffers and step 0 instead of continuing.

    Returns:
      An optimizer with all six coefficients frozen, and its state.

    Raises:
      ValueError: there is no such state, or more than one.
    """
    found = list(_find(opt_state).values())
    if len(found) != 1:
        raise ValueError(f"freeze found {len(found)} MADA states; expected one: pass one of them")
    (state,) = found
    settings = state.settings
    optimizer = mada(
        learning_rate,
        MadaHyperparams(*(float(x) for x in state.hyper)),
        frozen=NAMES,
        eps=settings.eps,
        lion_b1=settings.lion_b1,
        lion_b2=settings.lion_b2,
        second_moment=settings.rule.second_moment,
        max_after_correction=settings.rule.max_after_correction,
        diff_bias_correction=settings.rule.diff_bias_correction,
        compat="official" if settings.rule.official else None,
    )
    like = next(tree for tree in (*state.moments, state.gradient) if tree is not None)
    start = optimizer.init(like)
    if restart:
        return optimizer, start
    moments = state.moments
    if settings.learned:
        _, treedef = jax.tree.flatten(state.gradient)
        after = mada_step.redo(
            per_leaf(moments, treedef),
            jax.tree.leaves(state.gradient),
            last_step(state),
            settings.rule,
            state.count == 0,
        )
        moments = per_tree(after, moments, treedef)
    static, *rest = start
    kept = Moments(
        *(
            None if empty is None else jax.tree.map(lambda x, e: x.astype(e.dtype), full, empty)
            for empty, full in zip(static.moments, moments, strict=True)
        )
    )
    static = static._replace(count=state.count, moments=kept, learning_rate=state.learning_rate)
    rest = [  # only a schedule counts
        part._replace(count=state.count) if "count" in getattr(part, "_fields", ()) else part
        for part in rest
    ]
    return optimizer, (static, *rest)


def _find(opt_state) -> dict[str, MadaState]:
    def is_state(x):
        return isinstance(x, MadaState)

    pairs = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_state)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in pairs
        if is_state(x)
    }
    if not found:
        raise ValueError(f"no MADA state in an optimizer state of type {type(opt_state).__name__}")
    return found


def _one_or_all(values: dict[str, Any]):
    return next(iter(values.values())) if len(values) == 1 else values
