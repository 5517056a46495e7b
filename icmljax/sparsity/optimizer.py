"""An optimizer that moves only what a mask lets it move."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from icmljax.sparsity.masks import apply_masks, as_masks, is_hole


class MaskedState(NamedTuple):
    """State of `masked`.

    Attributes:
      masks: mask tree, like the parameters.
      inner_state: of the wrapped optimizer.
    """

    masks: Any
    inner_state: Any


def masked(
    tx: optax.GradientTransformation, masks: PyTree | Callable[[PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Keeps an optimizer from moving masked entries, pruned or frozen.

    The gradients are masked before ``tx`` sees them, so that global norms, second moments and
    hyper-gradients are those of the live entries; its updates are masked after it, so that neither
    momentum nor weight decay moves the others. Pruned entries stay exactly 0 (start from
    `icmljax.sparsity.masks.apply_masks`), frozen ones exactly what they are.

    Unlike ``optax.masked``, which picks whole leaves when it is built, masks here hold for entries
    and live in the state: checkpoints save them, meshes shard them like the parameters, and
    `set_masks` replaces them while training goes on.

    Example:
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
      >>> tx = masked(tx, masks)  # around the clipping too: the norm is that of the live entries

    Args:
      tx: any optimizer. It sees the parameters as they are, and gets extra arguments unchanged.
      masks: mask tree, or a function of the parameters that makes it when ``init`` is called (large
        masks that are made there never exist in one piece on a mesh).

    Returns:
      The optimizer. ``init`` and ``update`` raise a ValueError that names the parameter where masks
      and parameters do not fit.
    """
    inner = optax.with_extra_args_support(tx)
    # A tree of masks may be callable as well: an equinox module is.
    is_function = callable(masks) and jax.tree_util.all_leaves([masks])

    def init_fn(params):
        if not jax.tree.leaves(params):
            # No parameter of ours, or optax.tree.map_params, which asks where the parameter-like
            # trees are by an empty one: masks are such a tree.
            return MaskedState(params, inner.init(params))
        own = _owned(as_masks(params, masks(params) if is_function else masks))
        return MaskedState(own, inner.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        updates = apply_masks(updates, state.masks)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return apply_masks(updates, state.masks), MaskedState(state.masks, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def get_masks(opt_state: PyTree) -> PyTree:
    """The masks of the `MaskedState` inside any optimizer state.

    Args:
      opt_state: state of `masked`, or of ``optax.chain``, ``optax.multi_transform`` and the like
        around it; the masks of several groups of parameters are put together.

    Raises:
      ValueError: there is no such state, or there are several for the same parameters.
    """
    states = [
        x for x in jax.tree.leaves(opt_state, is_leaf=_is_masked_state) if _is_masked_state(x)
    ]
    if not states:
        raise ValueError(_none_in(opt_state))

    def only(*masks):
        present = [mask for mask in masks if not is_hole(mask)]
        if len(present) > 1:
            raise ValueError(
                f"{len(states)} masked optimizers in one state share parameters; pass the state of "
                "one of them"
            )
        return present[0] if present else masks[0]

    return jax.tree.map(only, *(state.masks for state in states), is_leaf=is_hole)


def set_masks(opt_state: PyTree, masks: PyTree) -> PyTree:
    """The optimizer state with other masks; all else, moments too, stays.

    Args:
      opt_state: see `get_masks`; each group of parameters takes its part.
      masks: mask tree whose leaves broadcast to the masks that they replace. (So a parameter that
        may become sparse later starts with a mask of its full shape.)

    Raises:
      ValueError: there is no `MaskedState`, or the masks do not fit; names the parameter.
    """
    if not any(map(_is_masked_state, jax.tree.leaves(opt_state, is_leaf=_is_masked_state))):
        raise ValueError(_none_in(opt_state))

    def replace(node):
        if not _is_masked_state(node):
            return node
        new = jax.tree.map(
            lambda new, old: jnp.broadcast_to(new, old.shape),
            as_masks(node.masks, masks),
            node.masks,
        )
        return node._replace(masks=_owned(new))

    return jax.tree.map(replace, opt_state, is_leaf=_is_masked_state)


def _owned(masks):
    """Copies: a step that donates its state must not take the caller's masks along."""
    return jax.tree.map(jnp.copy, masks)


def _is_masked_state(x):
    return isinstance(x, MaskedState)


def _none_in(opt_state):
    return (
        f"no masked optimizer in a state of type {type(opt_state).__name__}; expected the state of "
        "icmljax.sparsity.optimizer.masked, alone or inside others"
    )
