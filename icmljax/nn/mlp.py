"""Plain multi-layer perceptrons."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float


class MLP(nn.Module):
    """Dense layers with an activation between them (none after the last).

    Attributes:
      features: width of each layer; the last one is the output's.
      activation: elementwise function.
    """

    features: Sequence[int]
    activation: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch dim"]) -> Float[Array, "*batch out"]:
        """Maps `inputs` of any leading shape to outputs of width `features[-1]`.

        Raises:
          ValueError: `features` is empty.
        """
        if not self.features:
            raise ValueError("features is empty, expected the width of at least one layer")
        hidden = inputs
        for index, width in enumerate(self.features):
            if index > 0:
                hidden = self.activation(hidden)
            hidden = nn.Dense(width, name=f"dense_{index}")(hidden)
        return hidden


class DeepMLP(nn.Module):
    """Any number of equal layers, scanned: a thousand of them compile as fast as three.

    Parameters are those of the dense layers "input", "hidden" and "output"; the arrays of "hidden"
    have the `depth - 2` layers as their first axis.

    Attributes:
      depth: number of layers, >= 3.
      width: of all layers but the last.
      num_outputs: width of the last layer.
      activation: elementwise function after every layer but the last.
      kernel_init: initializer of all weights.
      dtype: type to compute in, except for the last layer; None: that of inputs and parameters.
      unroll: hidden layers in each step of the scan.
    """

    depth: int
    width: int
    num_outputs: int
    activation: Callable[[jax.Array], jax.Array] = nn.tanh
    kernel_init: Initializer = nn.linear.default_kernel_init
    dtype: Any = None
    unroll: int = 1

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch dim"]) -> Float[Array, "*batch out"]:
        """Maps `inputs` of any leading shape to outputs of width `num_outputs`.

        Raises:
          ValueError: there are fewer than 3 layers.
        """
        if self.depth < 3:
            raise ValueError(f"depth must be at least 3, got {self.depth}; MLP has fewer layers")
        dense = functools.partial(nn.Dense, kernel_init=self.kernel_init)
        hidden = self.activation(dense(self.width, dtype=self.dtype, name="input")(inputs))
        layer = dense(self.width, dtype=self.dtype, name="hidden")
        hidden = scan_layers(layer, self.activation, hidden, self.depth - 2, self.unroll)
        return dense(self.num_outputs, name="output")(hidden)


def scan_layers(
    layer: nn.Module,
    activation: Callable[[jax.Array], jax.Array],
    hidden: Float[Array, "*shape"],
    num_layers: int,
    unroll: int = 1,
) -> Float[Array, "*shape"]:
    """Applies `activation(layer(hidden))` over and over, each time with parameters of its own.

    Args:
      layer: flax module that keeps the shape; its parameters get the layers as their first axis.
      activation: elementwise function.
      hidden: input of the first layer.
      num_layers: number of layers.
      unroll: layers in each step of the scan.

    Returns:
      Output of the last layer.
    """
    scan = nn.scan(
        lambda layer, hidden: (activation(layer(hidden)), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=num_layers,
        unroll=unroll,
    )
    return scan(layer, hidden)[0]
