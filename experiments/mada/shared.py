"""What the three parts share."""

from typing import Any

import optax

from icmljax.optimizers import mada as mada_lib
from icmljax.optimizers.mada import MadaHyperparams
from icmljax.training.state import TrainState

NAMES = MadaHyperparams._fields
ADAM = MadaHyperparams(0.9, 0.95, 0.0, 1.0, 1.0, 1.0)
Optimizer = optax.GradientTransformation

# One setting for every problem: with normalised hyper-gradients it is the distance that a
# coefficient moves in a step.
NORMALIZED: dict[str, Any] = dict(
    hyper_normalization="ema", hyper_learning_rate=5e-3, hyper_momentum=0.0
)


def coefficients(train_state: TrainState) -> dict[str, Any]:
    """MADA's coefficients by name; nothing for other optimizers."""
    try:
        found = mada_lib.hyperparams(train_state.opt_state)
    except ValueError:
        return {}
    return dict(zip(NAMES, found, strict=True))
