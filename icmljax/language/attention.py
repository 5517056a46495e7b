"""Rotary positions and causal attention, shared by the backbone and all caches."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies for contexts longer than the pre-training's.

    Attributes:
      kind: "linear" divides all frequencies by `factor`; "llama3" only the low ones, with a smooth
        crossover (Llama 3.1).
      factor: how much longer the context becomes.
      low_frequency_factor: llama3: wavelengths above original_length / this are divided.
      high_frequency_factor: llama3: wavelengths below original_length / this stay.
      original_length: llama3: context of the pre-training.

    Raises:
      ValueError: a number is out of range.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"unknown rope scaling {self.kind!r}; expected 'linear' or 'llama3'")
        if not 0 < self.factor < math.inf:
            raise ValueError(
                f"the factor of a rope scaling must be above 0 and finite, got {self.factor}"
            )
        if self.kind == "llama3" and not (
            0 < self.low_frequency_factor < self.high_frequency_factor and self.original_length > 0
        ):
            raise ValueError(
                "llama3 rope scaling needs 0 < low_frequency_factor < high_frequency_factor and a "
                f"positive original_length, got {self}"
            )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
      theta: base of the frequencies, theta^(-2 i / head_dim).
      interleaved: the pairs that turn are channels (2i, 2i + 1), as GGUF files store Llama's
        queries and keys, instead of (i, i + head_dim / 2).
      scaling: for long contexts, or None.

    Raises:
      ValueError: theta is not positive and finite.

    Reference:
      J. Su et al., "RoFormer" (2021), equation 34.
    """

    theta: float = 10_000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if not 0 < self.theta < math.inf:
            raise ValueError(f"theta must be above 0 and finite, got {self.theta}")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the angle per position of each pair, float32 ``[head_dim / 2]``."""
        frequencies = self.theta ** (-np.arange(0.0, head_dim, 2) / head_dim)
        if self.scaling is not None:
            frequencies = _scaled(frequencies, self.scaling)
        return frequencies.astype(np.float32)

    def rotate(
        self,
        vectors: Float[Array, "batch time heads head_dim"],
        positions: Int[Array, "batch time"],
    ) -> Float[Array, "batch time heads head_dim"]:
        """Turns queries or keys to their positions; angles in float32."""
        angles = positions[..., None, None] * self.frequencies(vectors.shape[-1])
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        wide = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))
        if self.interleaved:
            pairs = wide.reshape(*wide.shape[:-1], -1, 2)
            first, second = pairs[..., 0], pairs[..., 1]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        turned = first * cos - second * sin, first * sin + second * cos
        if self.interleaved:
            result = jnp.stack(turned, axis=-1).reshape(vectors.shape)
        else:
            result = jnp.concatenate(turned, axis=-1)
        return result.astype(vectors.dtype)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_length * frequencies / (2 * math.pi)  # over the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def attend(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "#batch time keys"],
) -> Float[Array, "batch time heads head_dim"]:
    """Softmax attention with grouped queries: head h uses key head h // (heads / kv_heads).

    Args:
      query: already turned to its positions, like the keys.
      key: heads is a multiple of kv_heads.
      value: one for each key.
      mask: which keys a query sees.

    Returns:
      The mixed values; scores and softmax are in float32. A query that sees no key gets zeros.
    """
    batch, time, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btgrd,bsgd->bgrts", grouped, key, preferred_element_type=jnp.float32)
    seen = mask[:, None, None]
    scores = jnp.where(seen, scores / math.sqrt(head_dim), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-1e30))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1)).astype(value.dtype)
    mixed = jnp.einsum("bgrts,bsgd->btgrd", weights, value)
    return mixed.reshape(query.shape)


def causal_mask(
    positions: Int[Array, "batch time"], segment_ids: Int[Array, "batch time"] | None = None
) -> Bool[Array, "batch time time"]:
    """Returns which tokens of a sequence each of its tokens sees: itself and those before it.

    Args:
      positions: of the tokens; a token sees those at positions up to its own.
      segment_ids: where several documents share a row; a token sees its own document only. Tokens
        of segment 0 are padding, and seen by padding only.
    """
    mask = positions[:, :, None] >= positions[:, None, :]
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    return mask
