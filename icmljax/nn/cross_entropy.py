"""Cross-entropy of next tokens, weighted, and in chunks where all logits do not fit in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_losses(
    logits: Float[Array, "batch time vocab"], targets: Int[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """Returns the cross-entropy of every target in nats, float32 at least.

    Args:
      logits: unnormalised log-probabilities.
      targets: in 0 .. vocab - 1.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum instead of a gather: it stays local where the vocabulary is split over a mesh.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


def weighted_mean(
    values: Float[Array, "*shape"],
    weights: Float[Array, "*shape"] | Bool[Array, "*shape"] | None = None,
) -> Float[Array, ""]:
    """Returns ``sum(weights * values) / sum(weights)``.

    Args:
      values: finite.
      weights: not negative; None: all equal. If all are 0, so is the result.
    """
    if weights is None:
        return jnp.mean(values)
    weights = weights.astype(values.dtype)
    total = jnp.sum(weights)
    return jnp.sum(weights * values) / jnp.where(total > 0, total, 1)


def cross_entropy(
    logits: Float[Array, "batch time vocab"],
    targets: Int[Array, "batch time"],
    weights: Float[Array, "batch time"] | Bool[Array, "batch time"] | None = None,
) -> Float[Array, ""]:
    """Returns the weighted mean of the targets' cross-entropy in nats, float32 at least.

    Args:
      logits: unnormalised log-probabilities.
      targets: in 0 .. vocab - 1.
      weights: how much each target counts; None: all the same. If all are 0, so is the loss.
    """
    return weighted_mean(token_losses(logits, targets), weights)


def cross_entropy_chunked(
    hidden: Float[Array, "batch time dim"],
    table: Float[Array, "vocab dim"],
    targets: Int[Array, "batch time"],
    chunk: int,
    weights: Float[Array, "batch time"] | Bool[Array, "batch time"] | None = None,
) -> Float[Array, ""]:
    """Returns `cross_entropy` of ``hidden @ table.T`` without ever holding all logits.

    With GPT-2's vocabulary the logits and their gradient are most of a training step's memory; this
    brings them down by `time / chunk` for one more product with the table.

    Args:
      hidden: output of the last norm.
      table: of the output layer.
      targets: in 0 .. vocab - 1.
      chunk: positions at a time; divides the length of the sequence.
      weights: as for `cross_entropy`.

    Raises:
      ValueError: `chunk` does not divide the length of the sequence.
    """

    def losses(hidden, targets):
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        return token_losses(logits, targets)

    return weighted_mean(in_chunks(losses, (hidden, targets), chunk), weights)


def in_chunks(function: Callable[..., Any], arrays: tuple[Array, ...], chunk: int) -> Any:
    """Returns ``function(*arrays)``, computed for one chunk of the sequence after the other.

    The backward pass computes each chunk again instead of keeping what it needs.

    Args:
      function: of arrays ``[batch, chunk, ...]``, position by position, to a tree of such arrays.
      arrays: ``[batch, time, ...]``.
      chunk: positions at a time; divides the length of the sequence.

    Raises:
      ValueError: `chunk` does not divide the length of the sequence.
    """
    time = arrays[0].shape[1]
    if chunk < 1 or time % chunk:
        raise ValueError(f"chunk={chunk} does not divide the sequence of {time} tokens")

    def split(array):  # the sequence is cut, not the batch, which a mesh may have split
        parts = array.reshape(array.shape[0], time // chunk, chunk, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    def joined(parts):
        array = jnp.moveaxis(parts, 0, 1)
        return array.reshape(array.shape[0], time, *array.shape[3:])

    apply = jax.checkpoint(lambda pieces: function(*pieces))
    return jax.tree.map(joined, jax.lax.map(apply, tuple(map(split, arrays))))
