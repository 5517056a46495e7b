"""A convolution that is fast on CPUs where XLA's is slow."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def convolve(
    inputs: Float[Array, "batch height width channels"],
    kernel: Float[Array, "size_1 size_2 channels_of_group features"],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    feature_group_count: int = 1,
    **options: Any,
) -> Float[Array, "batch new_height new_width features"]:
    """Returns `jax.lax.conv_general_dilated` of images; for `flax.linen.Conv`.

    On CPUs XLA is slow at depthwise convolutions (10 times as slow as this) and at the gradient of
    any convolution inside a loop, so that of scanned layers (10 to 15 times). There the images are
    shifted to each place in the kernel, multiplied by it, and summed.

    Args:
      inputs: images, channels last.
      kernel: one input channel if depthwise.
      strides: two integers.
      padding: as for `jax.lax.conv_general_dilated`.
      feature_group_count: 1, or the number of channels in and out.
      **options: all others; no dilation.

    Returns:
      Images, channels last.
    """
    padding = _pads(inputs, kernel, strides, padding)
    by_xla = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        feature_group_count=feature_group_count,
        **options,
    )
    by_shifts = functools.partial(
        _by_shifts, strides=strides, padding=padding, depthwise=feature_group_count > 1
    )

    # The backward pass needs nothing but the inputs: what the two ways would keep besides is not
    # kept (nothing is computed twice for it, a convolution is linear).
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def either(inputs, kernel):
        return jax.lax.platform_dependent(inputs, kernel, cpu=by_shifts, default=by_xla)

    return either(inputs, kernel)


def _pads(inputs, kernel, strides, padding):
    if isinstance(padding, str):
        return jax.lax.padtype_to_pads(inputs.shape[1:3], kernel.shape[:2], strides, padding)
    return padding


def _by_shifts(inputs, kernel, *, strides, padding, depthwise):
    padded = jnp.pad(inputs, ((0, 0), *padding, (0, 0)))
    height, width = (padded.shape[axis + 1] - kernel.shape[axis] + 1 for axis in (0, 1))
    total = jnp.zeros((), jnp.promote_types(inputs.dtype, jnp.float32))
    for i, j in np.ndindex(kernel.shape[:2]):
        shifted = padded[:, i : i + height : strides[0], j : j + width : strides[1]]
        if depthwise:
            total = total + shifted * kernel[i, j, 0].astype(total.dtype)
        else:
            total = total + jnp.matmul(shifted, kernel[i, j], preferred_element_type=total.dtype)
    return total.astype(inputs.dtype)
