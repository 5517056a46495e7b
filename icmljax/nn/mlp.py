"""A plain multi-layer perceptron."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
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
