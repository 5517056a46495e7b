"""A plain convolutional network: no normalisation and no shortcuts, however deep it is."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from icmljax.nn.convolution import convolve
from icmljax.nn.mlp import scan_layers


class PlainCNN(nn.Module):
    """3 x 3 convolutions one after another, scanned: a thousand of them compile as fast as ten.

    One convolution keeps the resolution and two halve it; `depth - 6` more, 2 x 2 average pooling
    and a dense layer follow. Parameters are those of "input", "halve_1", "halve_2", "hidden" and
    "output"; the arrays of "hidden" have the `depth - 6` layers as their first axis.

    Attributes:
      depth: >= 7.
      channels: of every convolution.
      num_classes: number of outputs.
      activation: elementwise function after every convolution.
      padding: "CIRCULAR" (all pixels are alike, however deep the network is) or "SAME".
      kernel_init: initializer of all weights.
      dtype: type to compute in, except for the last layer; None: that of images and parameters.
      unroll: hidden layers in each step of the scan.

    Reference:
      L. Xiao et al., "Dynamical Isometry and a Mean Field Theory of CNNs: How to Train
      10,000-Layer Vanilla Convolutional Neural Networks" (2018).
    """

    depth: int
    channels: int = 128
    num_classes: int = 10
    activation: Callable[[jax.Array], jax.Array] = nn.tanh
    padding: str = "CIRCULAR"
    kernel_init: Initializer = nn.linear.default_kernel_init
    dtype: Any = None
    unroll: int = 1

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch classes"]:
        """Returns the logits.

        Raises:
          ValueError: there are fewer than 7 layers, or a side of the images is no multiple of 8.
        """
        height, width = images.shape[1:3]
        if self.depth < 7:
            raise ValueError(f"depth must be at least 7, got {self.depth}")
        if height % 8 or width % 8:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be halved three times; pad or resize"
                " them to multiples of 8"
            )
        conv = functools.partial(
            nn.Conv,
            self.channels,
            (3, 3),
            padding=self.padding,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
        )
        hidden = self.activation(conv(name="input")(images))
        for name in ("halve_1", "halve_2"):
            hidden = self.activation(conv(strides=2, name=name)(hidden))
        layer = conv(conv_general_dilated=convolve, name="hidden")
        hidden = scan_layers(layer, self.activation, hidden, self.depth - 6, self.unroll)
        hidden = nn.avg_pool(hidden, (2, 2), strides=(2, 2)).reshape(len(images), -1)
        return nn.Dense(self.num_classes, kernel_init=self.kernel_init, name="output")(hidden)
