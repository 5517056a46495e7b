"""Residual networks for small images."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from icmljax.nn.convolution import convolve
from icmljax.nn.norm import ConvNorm


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut without parameters.

    `__call__` has the form of the body of a scan.

    Attributes:
      channels: number of output channels; with `stride`, twice that of the inputs.
      stride: of the first convolution.
      activation: elementwise function.
      conv: `ConvNorm` with the settings of the network.
    """

    channels: int
    stride: int
    activation: Callable[[jax.Array], jax.Array]
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch height width channels"], train: bool
    ) -> tuple[Float[Array, "batch new_height new_width new_channels"], None]:
        """Returns the block's output, and None (a scan's per-step output)."""
        hidden = self.conv(self.channels, stride=self.stride, name="conv_1")(inputs, train)
        hidden = self.conv(self.channels, name="conv_2")(self.activation(hidden), train)
        missing = self.channels - inputs.shape[-1]
        shortcut = jnp.pad(
            inputs[:, :: self.stride, :: self.stride],
            ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)),
        )
        return self.activation(shortcut + hidden), None


class CifarResNet(nn.Module):
    """ResNet-20, -32, -44, -56, -110 ... for images of about 32 x 32 pixels.

    Three stages of `(depth - 2) / 6` blocks with `width`, `2 width` and `4 width` channels; where
    channels double, the resolution halves. Equal blocks of a stage are scanned: their parameters
    and running averages in "stage_1", "stage_2", "stage_3" have the blocks as their first axis. The
    blocks that halve the resolution are "halve_2" and "halve_3".

    Attributes:
      depth: 6 n + 2, the number of layers.
      num_classes: number of outputs.
      activation: elementwise function.
      width: number of channels of the first stage.
      momentum: of the running averages.
      kernel_init: initializer of all weights.
      dtype: type to compute in, except for the last layer; None: that of images and parameters.

    Reference:
      K. He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2, option A.
    """

    depth: int = 32
    num_classes: int = 10
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    width: int = 16
    momentum: float = 0.9
    kernel_init: Initializer = nn.linear.default_kernel_init
    dtype: Any = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"], train: bool
    ) -> Float[Array, "batch classes"]:
        """Returns the logits.

        Args:
          images: a batch.
          train: whether to normalise by the batch instead of by the running averages.

        Raises:
          ValueError: there is no such depth.
        """
        if self.depth < 8 or self.depth % 6 != 2:
            raise ValueError(f"depth must be 6 n + 2 (8, 14, 20, 32, 56, ...), got {self.depth}")
        blocks = (self.depth - 2) // 6
        conv = functools.partial(
            ConvNorm, momentum=self.momentum, kernel_init=self.kernel_init, dtype=self.dtype
        )
        scanned_conv = functools.partial(conv, convolve=convolve)
        hidden = self.activation(conv(self.width, name="input")(images, train))
        for stage in (1, 2, 3):
            channels = self.width * 2 ** (stage - 1)
            equal = blocks
            if stage > 1:
                first = Block(channels, 2, self.activation, conv, name=f"halve_{stage}")
                hidden, _ = first(hidden, train)
                equal = blocks - 1
            if equal:
                stack = nn.scan(
                    Block,
                    variable_axes={"params": 0, "batch_stats": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,
                    length=equal,
                )(channels, 1, self.activation, scanned_conv, name=f"stage_{stage}")
                hidden, _ = stack(hidden, train)
        features = hidden.mean((1, 2))
        return nn.Dense(self.num_classes, kernel_init=self.kernel_init, name="output")(features)
