"""Complete optimizers: MADA and the members of its family that are baselines."""

from typing import Any, Literal

import numpy as np
import optax

from icmljax.kernels.mada_step import MadaHyperparams
from icmljax.optimizers.mada.transform import (
    BOX,
    DEFAULT_HYPER_LEARNING_RATE,
    DEFAULT_INIT,
    NAMES,
    PerCoefficient,
    check_range,
    is_number,
    scale_by_mada,
)


def mada(  # noqa: D417 - the rest is scale_by_mada's
    learning_rate: optax.ScalarOrSchedule,
    init: PerCoefficient = DEFAULT_INIT,
    *,
    weight_decay: Any = 0.0,
    mask: Any = None,
    hyper_learning_rate: PerCoefficient = DEFAULT_HYPER_LEARNING_RATE,
    hyper_momentum: PerCoefficient = 0.0,
    hyper_normalization: Literal["sign", "ema"] | None = None,
    bounds: PerCoefficient = BOX,
    frozen: tuple[str, ...] = (),
    eps: Any = 1e-6,
    lion_b1: Any = 0.95,
    lion_b2: Any = 0.98,
    second_moment: Literal["avg", "max"] = "avg",
    max_after_correction: bool = False,
    diff_bias_correction: bool = False,
    initial_accumulator: Any = 0.0,
    hyper_start_step: Any = 50,
    hyper_grad_clip: Any = 10.0,
    state_dtype: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    compat: Literal["official"] | None = None,
    implementation: Literal["xla", "pallas"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MADA as a complete optimizer.

    Example:
      >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), mada(1e-3))

    Args:
      learning_rate: a number or a schedule.
      init: initial coefficients; see :func:`scale_by_mada`.
      weight_decay: decoupled decay: the parameters also move by ``-lr * weight_decay * x``.
      mask: which leaves decay, as in ``optax.add_decayed_weights``.

    All other arguments are those of :func:`scale_by_mada`. (They are written out because
    ``optax.inject_hyperparams`` reads them from the signature.)

    Returns:
      An optax transformation whose ``update`` accepts ``hyper_grads`` (see
      :func:`scale_by_mada`) and needs ``params`` only for weight decay.

    Raises:
      ValueError: as :func:`scale_by_mada`, and for a negative weight decay.

    Reference:
      Ozkara et al. 2024 (arXiv 2401.08893).
    """
    direction = scale_by_mada(
        learning_rate,
        init,
        hyper_learning_rate=hyper_learning_rate,
        hyper_momentum=hyper_momentum,
        hyper_normalization=hyper_normalization,
        bounds=bounds,
        frozen=frozen,
        eps=eps,
        lion_b1=lion_b1,
        lion_b2=lion_b2,
        second_moment=second_moment,
        max_after_correction=max_after_correction,
        diff_bias_correction=diff_bias_correction,
        initial_accumulator=initial_accumulator,
        hyper_start_step=hyper_start_step,
        hyper_grad_clip=hyper_grad_clip,
        state_dtype=state_dtype,
        axis_name=axis_name,
        compat=compat,
        implementation=implementation,
    )
    return _with_learning_rate(direction, learning_rate, weight_decay, mask)


def hyper_adam(  # noqa: D417 - the rest is scale_by_mada's
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.95,
    *,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    mask: Any = None,
    hyper_learning_rate: PerCoefficient = DEFAULT_HYPER_LEARNING_RATE,
    hyper_momentum: PerCoefficient = 0.0,
    hyper_normalization: Literal["sign", "ema"] | None = None,
    bounds: PerCoefficient = BOX,
    hyper_start_step: Any = 50,
    hyper_grad_clip: Any = 10.0,
    state_dtype: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: Literal["xla", "pallas"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam that learns its two betas by hyper-gradient descent (3 buffers a parameter).

    Args:
      learning_rate: a number or a schedule.
      b1: initial decay of the first moment.
      b2: initial decay of the second moment.
      eps: added to sqrt(vhat), outside the root.
      weight_decay: decoupled weight decay.
      mask: which leaves decay.

    All other arguments are those of :func:`scale_by_mada`.

    Returns:
      An optax transformation.

    Reference:
      Ozkara et al. 2024, the baseline HyperAdam; Chandra et al. 2022.
    """
    init = MadaHyperparams(b1, b2, 0.0, 1.0, 1.0, 1.0)
    frozen = ("beta3", "rho", "c", "gamma")
    direction = scale_by_mada(
        learning_rate,
        init,
        frozen=frozen,
        eps=eps,
        hyper_learning_rate=hyper_learning_rate,
        hyper_momentum=hyper_momentum,
        hyper_normalization=hyper_normalization,
        bounds=bounds,
        hyper_start_step=hyper_start_step,
        hyper_grad_clip=hyper_grad_clip,
        state_dtype=state_dtype,
        axis_name=axis_name,
        implementation=implementation,
    )
    return _with_learning_rate(direction, learning_rate, weight_decay, mask)


def scale_by_avgrad(
    b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8, *, state_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Rescale gradients by AVGrad: Adam whose denominator is the running average of v.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root.
      state_dtype: dtype of the buffers; None: that of the parameters, and at least float32.

    Returns:
      An optax transformation. sqrt(vbar_t) sqrt(t) never decreases, which is what makes
      AMSGrad converge where Adam may not, and it does so smoothly.

    Reference:
      Ozkara et al. 2024, AVGrad.
    """
    init = MadaHyperparams(b1, b2, 0.0, 0.0, 1.0, 1.0)
    return scale_by_mada(init=init, frozen=NAMES, eps=eps, state_dtype=state_dtype)


def avgrad(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    *,
    weight_decay: Any = 0.0,
    mask: Any = None,
    state_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AVGrad as a complete optimizer; arguments as :func:`scale_by_avgrad` and :func:`mada`."""
    direction = scale_by_avgrad(b1, b2, eps, state_dtype=state_dtype)
    return _with_learning_rate(direction, learning_rate, weight_decay, mask)


def _with_learning_rate(direction, learning_rate, weight_decay, mask):
    check_range("weight_decay", weight_decay, 0.0, np.inf)
    parts = [direction, optax.scale_by_learning_rate(learning_rate)]
    if not (is_number(weight_decay) and weight_decay == 0):
        parts.insert(1, optax.add_decayed_weights(weight_decay, mask))
    return optax.chain(*parts)
