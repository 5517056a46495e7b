"""VGG with batch normalisation, for small images."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from icmljax.nn.norm import ConvNorm

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, number of convolutions


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 with batch normalisation, and one dense layer.

    After each of five stages the resolution is halved; what remains (one pixel of images of 32 x
    32) is averaged. Convolutions are called "conv_1_1" ... "conv_5_3", the dense layer "output".

    Attributes:
      num_classes: number of outputs.
      activation: elementwise function.
      momentum: of the running averages.
      kernel_init: initializer of all weights.
      dtype: type to compute in, except for the last layer; None: that of images and parameters.

    Reference:
      K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
      Recognition" (2015), configuration D; with one dense layer instead of three, as is usual for
      small images.
    """

    num_classes: int = 10
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    momentum: float = 0.9
    kernel_init: Initializer = nn.linear.default_kernel_init
    dtype: Any = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"], train: bool
    ) -> Float[Array, "batch classes"]:
        """Returns the logits.

        Args:
          images: a batch; sides of at least 32 pixels.
          train: whether to normalise by the batch instead of by the running averages.

        Raises:
          ValueError: the images are smaller.
        """
        height, width = images.shape[1:3]
        if min(height, width) < 32:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be halved five times; pad or resize"
                " them to 32 x 32 or more"
            )
        conv = functools.partial(
            ConvNorm, momentum=self.momentum, kernel_init=self.kernel_init, dtype=self.dtype
        )
        hidden = images
        for stage, (channels, num_convs) in enumerate(_STAGES, start=1):
            for index in range(1, num_convs + 1):
                hidden = conv(channels, name=f"conv_{stage}_{index}")(hidden, train)
                hidden = self.activation(hidden)
            hidden = nn.max_pool(hidden, (2, 2), strides=(2, 2))
        features = hidden.mean((1, 2))
        return nn.Dense(self.num_classes, kernel_init=self.kernel_init, name="output")(features)
