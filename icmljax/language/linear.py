"""Weights of linear maps: dense, in blocks of small integers, with a low-rank part beside them.

Any matrix among the parameters of a language model may be one of

- a dense array ``[..., *in, *out]``;
- a `BlockQuantized`, 4 or 8 bits a weight, which stays so in memory and becomes dense where it is
  used, one layer at a time;
- a `LowRank`, one of these with a trainable product of two thin matrices added (LoRA).

`linear` multiplies with all three. Leading axes (layers, experts) are cut off by ``scan``, ``vmap``
or indexing before.
"""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

BLOCK = 32


@flax.struct.dataclass
class BlockQuantized:
    """A matrix in blocks of 32 weights along the input: ``scale * integer + offset``.

    Attributes:
      values: int8 ``[..., out, blocks, 32]``, or for 4 bits uint8 ``[..., out, blocks, 16]`` whose
        byte j holds weight j (low half) and weight j + 16 (high half).
      scale: floating point ``[..., out, blocks]``.
      offset: like `scale`, or None for 0.
      bits: 4 or 8.
      in_shape: the axes of the input, whose product is 32 x blocks.
      out_shape: the axes of the output, whose product is out.
    """

    values: Any
    scale: Any
    offset: Any
    bits: int = flax.struct.field(pytree_node=False)
    in_shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    out_shape: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def rows(self, dtype: DTypeLike) -> Float[Array, "*lead out in"]:
        """The matrix, one row for each output."""
        values = self.values
        if self.bits == 4:
            values = jnp.concatenate([values & 15, values >> 4], axis=-1)
        weights = values.astype(self.scale.dtype) * self.scale[..., None]
        if self.offset is not None:
            weights = weights + self.offset[..., None]
        return weights.reshape(*weights.shape[:-2], -1).astype(dtype)

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """The matrix as a dense weight ``[..., *in, *out]``."""
        matrix = jnp.swapaxes(self.rows(dtype), -1, -2)
        return matrix.reshape(*matrix.shape[:-2], *self.in_shape, *self.out_shape)


@flax.struct.dataclass
class LowRank:
    """A weight with a low-rank update: ``base + scale * down @ up``.

    Attributes:
      base: dense or `BlockQuantized`.
      down: ``[..., in, rank]``.
      up: ``[..., rank, out]``.
      scale: usually alpha / rank.

    Reference:
      E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.
    """

    base: Any
    down: Any
    up: Any
    scale: float = flax.struct.field(pytree_node=False)


Weight = Array | BlockQuantized | LowRank


def linear(
    inputs: Float[Array, "..."], weight: Any, *, num_in: int = 1, dtype: Any = None
) -> Float[Array, "..."]:
    """Multiplies with a weight.

    Args:
      inputs: ``[..., *in]``.
      weight: ``[*in, *out]``, dense, `BlockQuantized` or `LowRank`.
      num_in: number of input axes.
      dtype: of the result; None: that of the inputs.

    Returns:
      ``[..., *out]``.
    """
    if isinstance(weight, LowRank):
        flat = inputs.reshape(*inputs.shape[: inputs.ndim - num_in], -1)
        update = flat @ weight.down.astype(inputs.dtype) @ weight.up.astype(inputs.dtype)
        result = linear(inputs, weight.base, num_in=num_in, dtype=dtype)
        return result + (weight.scale * update).reshape(result.shape).astype(result.dtype)
    if isinstance(weight, BlockQuantized):
        lead = inputs.shape[: inputs.ndim - num_in]
        flat = inputs.reshape(math.prod(lead), -1)
        result = _multiply_halves(flat, weight) if weight.bits == 4 else _multiply(flat, weight)
        return result.reshape(*lead, *weight.out_shape).astype(dtype or inputs.dtype)
    axes = tuple(range(inputs.ndim - num_in, inputs.ndim)), tuple(range(num_in))
    return jax.lax.dot_general(
        inputs, weight.astype(inputs.dtype), (axes, ((), ())), preferred_element_type=dtype
    )


def _multiply(inputs: Float[Array, "rows in"], weight: BlockQuantized) -> Float[Array, "rows out"]:
    return jax.lax.dot_general(
        inputs,
        weight.rows(inputs.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=_sum_dtype(inputs),
    )


def _multiply_halves(
    inputs: Float[Array, "rows in"], weight: BlockQuantized
) -> Float[Array, "rows out"]:
    """The product with 4 bits: that of the low halves of the bytes plus that of the high halves.

    The halves are an outermost axis: side by side in a row they would be chosen weight by weight,
    which takes four times as long on CPUs. The offsets meet the sums of the inputs' blocks.
    """
    rows, (blocks, half) = inputs.shape[0], weight.values.shape[-2:]
    scale = weight.scale
    # Around 0, so that a type with few digits rounds weights no more than the dense matrix would.
    level = weight.values.astype(scale.dtype)[None]
    high = jnp.floor(level / 16)
    is_high = jnp.arange(2)[:, None, None, None] == 1
    level = jnp.where(is_high, high, level - 16 * high) - 8
    matrix = (level * scale[..., None]).astype(inputs.dtype).reshape(2, -1, blocks * half)
    halves = jnp.moveaxis(inputs.reshape(rows, blocks, 2, half), 2, 0).reshape(2, rows, -1)
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=_sum_dtype(inputs),
    )
    if rows == 1:  # fused with the unpacking, which then never reaches memory
        product = jnp.sum(jax.vmap(dot)(halves, matrix), axis=0)
    else:
        product = dot(halves[0], matrix[0]) + dot(halves[1], matrix[1])
    sums = jnp.sum(inputs.reshape(rows, blocks, BLOCK), axis=-1, dtype=product.dtype)
    offset = 8 * scale if weight.offset is None else weight.offset + 8 * scale
    return product + sums @ offset.astype(product.dtype).T


def _sum_dtype(inputs: Array) -> Any:
    return jnp.promote_types(inputs.dtype, jnp.float32)


def quantize(weight: ArrayLike, bits: int, *, num_in: int = 1, num_lead: int = 0) -> BlockQuantized:
    """Rounds a dense weight to blocks of integers.

    8 bits: symmetric, ``scale = max |w| / 127``. 4 bits: ``scale = (max - min) / 15`` and
    ``offset = min`` of the block.

    Args:
      weight: ``[*lead, *in, *out]``; the product of the input axes is a multiple of 32.
      bits: 4 or 8.
      num_in: number of input axes.
      num_lead: number of leading axes, such as that of the layers.

    Raises:
      ValueError: another number of bits, or an input that 32 does not divide.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; blocks are made of 4 or 8 bits")
    weight = jnp.asarray(weight)
    lead, rest = weight.shape[:num_lead], weight.shape[num_lead:]
    in_shape, out_shape = rest[:num_in], rest[num_in:]
    inputs = math.prod(in_shape)
    if inputs % BLOCK:
        raise ValueError(
            f"an input of {in_shape} has {inputs} entries, which is no multiple of {BLOCK}; "
            "leave this weight dense"
        )
    rows = jnp.swapaxes(weight.reshape(*lead, inputs, -1), -1, -2).astype(jnp.float32)
    blocks = rows.reshape(*rows.shape[:-1], inputs // BLOCK, BLOCK)
    if bits == 8:
        scale, offset = jnp.max(jnp.abs(blocks), axis=-1) / 127, None
        values = jnp.round(blocks / _nonzero(scale)[..., None]).astype(jnp.int8)
    else:
        offset = jnp.min(blocks, axis=-1)
        scale = (jnp.max(blocks, axis=-1) - offset) / 15
        levels = jnp.round((blocks - offset[..., None]) / _nonzero(scale)[..., None])
        low, high = jnp.split(levels.astype(jnp.uint8), 2, axis=-1)
        values = low | high << 4
    return BlockQuantized(values, scale, offset, bits, in_shape, out_shape)


def _nonzero(scale):
    return jnp.where(scale > 0, scale, 1)


def weight_bytes(weight: Any) -> int:
    """Bytes of all arrays of a weight, or of a tree of weights."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
