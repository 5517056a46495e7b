"""What the three parts share."""

from typing import Any

import optax

from icmljax.optimizers import mada as mada_lib
from icmljax.optimizers.mada import MadaHyperparams
from icmljax.training.state import TrainState

NAMES = MadaHyperparams._fields
ADAM = MadaHyperparams(0.9, 0.95, 0.0, 1.0, 1.0, 1.0)
Optimizer = optax.GradientTransformation

# How the coefficients learn. The first two follow the authors' presets, which differ by a factor of
# ten and more, because a hyper-gradient scales with the loss, the learning rate and the model; a
# normalised one does not: its step size is the distance that a coefficient moves in a step.
DIGITS_RATES: dict[str, Any] = dict(
    hyper_learning_rate=MadaHyperparams(2.5e-2, 2.5e-2, 1.0, 1.0, 1.0, 1.0),
    hyper_momentum=dict(beta1=0.5, beta2=0.5),
)
TEXT_RATES: dict[str, Any] = dict(
    hyper_learning_rate=mada_lib.DEFAULT_HYPER_LEARNING_RATE, hyper_momentum=0.0
)
NORMALIZED_RATES: dict[str, Any] = dict(
    hyper_normalization="ema", hyper_learning_rate=5e-3, hyper_momentum=0.0
)


def coefficients(train_state: TrainState) -> dict[str, Any]:
    """MADA's coefficients by name; nothing for other optimizers."""
    try:
        found = mada_lib.hyperparams(train_state.opt_state)
    except ValueError:
        return {}
    return dict(zip(NAMES, found, strict=True))
