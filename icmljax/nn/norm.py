"""Batch normalisation: with convolutions, and without running averages."""

from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, PyTree


class ConvNorm(nn.Module):
    """A convolution without bias ("conv"), then batch normalisation ("norm").

    Under `jax.jit` on a mesh the statistics are those of the whole batch.

    Attributes:
      features: number of output channels.
      size: of the kernel, odd; as much is padded as keeps the resolution at stride 1.
      stride: of the kernel.
      groups: of channels, each convolved on its own.
      momentum: of the running averages.
      kernel_init: initializer of the kernel.
      dtype: type to compute in, with statistics in float32; None: that of inputs and parameters.
      convolve: takes the place of `jax.lax.conv_general_dilated`.
    """

    features: int
    size: int = 3
    stride: int = 1
    groups: int = 1
    momentum: float = 0.9
    kernel_init: Initializer = nn.linear.default_kernel_init
    dtype: Any = None
    convolve: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch height width channels"], train: bool
    ) -> Float[Array, "batch new_height new_width features"]:
        """Normalises by the batch (`train`) or by the running averages."""
        # Padding both sides alike puts the centres of strided kernels on pixels 0, stride, ...
        outputs = nn.Conv(
            self.features,
            (self.size, self.size),
            strides=self.stride,
            padding=self.size // 2,
            feature_group_count=self.groups,
            use_bias=False,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
            conv_general_dilated=self.convolve,
            name="conv",
        )(inputs)
        norm = nn.BatchNorm(not train, momentum=self.momentum, dtype=self.dtype, name="norm")
        return norm(outputs)


def batch_statistics(
    model: nn.Module, params: PyTree, batches: Iterable[Array | np.ndarray]
) -> PyTree:
    """Returns mean and variance of every batch normalisation's input over some batches.

    With them training needs no running averages: `model.apply({"params": params}, images,
    train=True, mutable=["batch_stats"])` is pure when what it returns for "batch_stats" is thrown
    away, and the statistics below are those of the parameters that are evaluated.

    Args:
      model: network with a field `momentum` that is called as `model(images, train)`.
      params: its parameters.
      batches: batches of one size. The mean is that of all of them; the variance is that of all of
        them around it (not only within each batch).

    Returns:
      The collection "batch_stats", for `model.apply({"params": params, "batch_stats": ...}, images,
      train=False)`.

    Raises:
      ValueError: there are no batches.

    Reference:
      Y. Wu and J. Johnson, "Rethinking 'Batch' in BatchNorm" (2021), section 3.
    """
    latest = model.clone(momentum=0.0)  # the running average is the last batch
    seen = [_statistics_of_batch(latest, params, images) for images in batches]
    if not seen:
        raise ValueError("got no batches; statistics need at least one")
    return _pool(jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen))


@jax.jit(static_argnums=0)
def _statistics_of_batch(model, params, images):
    _, updates = model.apply({"params": params}, images, train=True, mutable=["batch_stats"])
    return updates["batch_stats"]


def _pool(stats):
    if "var" not in stats:
        return {name: _pool(part) for name, part in stats.items()}
    within, between = stats["var"].mean(0), stats["mean"].var(0)
    return {"mean": stats["mean"].mean(0), "var": within + between}
