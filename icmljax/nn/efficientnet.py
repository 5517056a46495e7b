"""EfficientNet: inverted residual blocks with depthwise convolutions and squeeze-and-excitation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from icmljax.nn.convolution import convolve
from icmljax.nn.norm import ConvNorm


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks of one resolution.

    Attributes:
      channels: number of output channels.
      num_blocks: number of blocks.
      stride: of the first one.
      size: of the depthwise kernels.
      expansion: channels inside a block for each of its input channels.
    """

    channels: int
    num_blocks: int = 1
    stride: int = 1
    size: int = 3
    expansion: int = 6


@dataclasses.dataclass(frozen=True)
class EfficientNetConfig:
    """Sizes of an EfficientNet.

    Attributes:
      stages: the stages of blocks.
      stem_channels: output channels of the first convolution.
      stem_stride: its stride.
      head_channels: output channels of the last convolution.
      squeeze: channels of a block's squeeze-and-excitation for each of its input channels.
      dropout: rate before the last layer.
      stochastic_depth: rate at which the last block is left out in training; that of the others
        rises linearly from 0.
    """

    stages: tuple[Stage, ...]
    stem_channels: int = 32
    stem_stride: int = 2
    head_channels: int = 1280
    squeeze: float = 0.25
    dropout: float = 0.0
    stochastic_depth: float = 0.0

    def __post_init__(self):
        for name in ("dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if not self.stages or any(stage.num_blocks < 1 for stage in self.stages):
            raise ValueError(f"every stage needs a block, got stages={self.stages}")


def b0(**changes: Any) -> EfficientNetConfig:
    """EfficientNet-B0, which expects images of about 224 x 224 pixels.

    Args:
      **changes: fields that differ, for example `stem_stride=1` for smaller images.
    """
    stages = (
        Stage(16, 1, expansion=1),
        Stage(24, 2, stride=2),
        Stage(40, 2, stride=2, size=5),
        Stage(80, 3, stride=2),
        Stage(112, 3, size=5),
        Stage(192, 4, stride=2, size=5),
        Stage(320, 1),
    )
    return dataclasses.replace(EfficientNetConfig(stages), **changes)


def small(**changes: Any) -> EfficientNetConfig:
    """A small EfficientNet for images of 28 x 28 or 32 x 32 pixels.

    Args:
      **changes: fields that differ.
    """
    stages = (
        Stage(16, 1, expansion=1),
        Stage(24, 2, stride=2, expansion=4),
        Stage(40, 2, stride=2, expansion=4),
    )
    config = EfficientNetConfig(stages, stem_channels=16, head_channels=160)
    return dataclasses.replace(config, **changes)


class Block(nn.Module):
    """Expands the channels, convolves each of them, weighs them, and contracts them again.

    Attributes:
      stage: sizes.
      stride: of the depthwise convolution.
      squeeze: channels of the squeeze-and-excitation for each input channel.
      drop_rate: rate at which the block is left out in training.
      activation: elementwise function.
      conv: `ConvNorm` with the settings of the network.
    """

    stage: Stage
    stride: int
    squeeze: float
    drop_rate: float
    activation: Callable[[jax.Array], jax.Array]
    conv: Callable[..., ConvNorm]

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch height width channels"], train: bool
    ) -> Float[Array, "batch new_height new_width new_channels"]:
        """Returns the block's output, a residual one where shapes allow."""
        stage, conv = self.stage, self.conv
        channels = inputs.shape[-1]
        inner = channels * stage.expansion
        hidden = inputs
        if stage.expansion > 1:
            hidden = self.activation(conv(inner, 1, name="expand")(hidden, train))
        depthwise = conv(
            inner,
            stage.size,
            self.stride,
            groups=inner,
            convolve=convolve,
            name="depthwise",
        )
        hidden = self.activation(depthwise(hidden, train))

        dense = functools.partial(
            nn.Dense, kernel_init=depthwise.kernel_init, dtype=depthwise.dtype
        )
        squeezed = dense(max(1, int(channels * self.squeeze)), name="squeeze")(hidden.mean((1, 2)))
        weights = nn.sigmoid(dense(inner, name="excite")(self.activation(squeezed)))
        hidden = hidden * weights[:, None, None]

        hidden = conv(stage.channels, 1, name="contract")(hidden, train)
        if hidden.shape != inputs.shape:
            return hidden
        # One draw for each image: the whole block is left out, or none of it.
        drop = nn.Dropout(self.drop_rate, broadcast_dims=(1, 2, 3), deterministic=not train)
        return inputs + drop(hidden)


class EfficientNet(nn.Module):
    """A family of convolutional networks with depthwise convolutions.

    Blocks are called "block_1_1", "block_2_1", ... (stage and position in it).

    Attributes:
      config: sizes.
      num_classes: number of outputs.
      activation: elementwise function; the authors' is `nn.swish`.
      momentum: of the running averages.
      kernel_init: initializer of all weights.
      dtype: type to compute in, except for the last layer; None: that of images and parameters.

    Reference:
      M. Tan and Q. Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks"
      (2019), table 1.
    """

    config: EfficientNetConfig
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
          images: a batch.
          train: whether to normalise by the batch instead of by the running averages, and to drop
            what `config` says, which needs `rngs={"dropout": key}`.
        """
        config = self.config
        conv = functools.partial(
            ConvNorm, momentum=self.momentum, kernel_init=self.kernel_init, dtype=self.dtype
        )
        stem = conv(config.stem_channels, stride=config.stem_stride, name="stem")
        hidden = self.activation(stem(images, train))
        places = [
            (number, index, stage)
            for number, stage in enumerate(config.stages, start=1)
            for index in range(stage.num_blocks)
        ]
        for passed, (number, index, stage) in enumerate(places):
            block = Block(
                stage,
                stage.stride if index == 0 else 1,
                config.squeeze,
                config.stochastic_depth * passed / max(1, len(places) - 1),
                self.activation,
                conv,
                name=f"block_{number}_{index + 1}",
            )
            hidden = block(hidden, train)
        hidden = self.activation(conv(config.head_channels, 1, name="head")(hidden, train))
        features = nn.Dropout(config.dropout, deterministic=not train)(hidden.mean((1, 2)))
        return nn.Dense(self.num_classes, kernel_init=self.kernel_init, name="output")(features)
