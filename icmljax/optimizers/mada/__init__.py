"""MADA: one optimizer that contains Adam, AMSGrad, AVGrad, Yogi, Adan and Lion, and learns which.

Ozkara et al., "MADA: Meta-Adaptive Optimizers Through Hyper-Gradient Descent", ICML 2024,
arXiv 2401.08893. With g_t the gradient and d_t = g_t - g_{t-1}, a step is::

    ghat = g + beta3 d
    q    = c ghat^2 + (1 - c) [v + ghat^2 sign(ghat^2 - v)]
    m    = beta1 m + (1 - beta1) g
    v    = beta2 v + (1 - beta2) q
    n    = beta3 n + (1 - beta3) d
    vbar = ((t - 1) vbar + v) / t                          (or the running maximum)
    u    = l1 l + (1 - l1) g;   l = l2 l + (1 - l2) g
    vhat = (rho v + (1 - rho) vbar) / (1 - beta2^t)
    D    = gamma (m / (1 - beta1^t) + beta3 n) / (sqrt(vhat) + eps) + (1 - gamma) sign(u)
    x    = x - lr D

The coefficients h = (beta1, beta2, beta3, rho, c, gamma) used at step t move the parameters to
x_t, and the loss there has gradient g_{t+1}: so dL/dh = -lr_t <g_{t+1}, dD_t/dh>, and before step
t + 1 the coefficients descend it inside a box. The state therefore keeps the *inputs* of the last
step: the next call redoes that step together with its derivative, at the price of one buffer.

The equations themselves are in :mod:`icmljax.kernels.mada_step`.
"""

from icmljax.kernels.mada_step import MadaHyperparams
from icmljax.optimizers.mada.aliases import avgrad, hyper_adam, mada, scale_by_avgrad
from icmljax.optimizers.mada.inspection import freeze, hyper_gradient, hyperparams
from icmljax.optimizers.mada.transform import (
    BOX,
    DEFAULT_HYPER_LEARNING_RATE,
    DEFAULT_INIT,
    NAMES,
    MadaState,
    scale_by_mada,
)

__all__ = [
    "BOX",
    "DEFAULT_HYPER_LEARNING_RATE",
    "DEFAULT_INIT",
    "NAMES",
    "MadaHyperparams",
    "MadaState",
    "avgrad",
    "freeze",
    "hyper_adam",
    "hyper_gradient",
    "hyperparams",
    "mada",
    "scale_by_avgrad",
    "scale_by_mada",
]
