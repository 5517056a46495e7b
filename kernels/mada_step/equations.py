"""The equations of a MADA step and of its hyper-gradient, elementwise, once for all back ends."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Scalar = Any  # a Python float (static: the code below specialises on it) or a traced scalar


class MadaHyperparams(NamedTuple):
    """The six coefficients h of MADA, or one value per coefficient of anything else.

    Attributes:
      beta1: decay of the first moment m.
      beta2: decay of the second moment v.
      beta3: weight and decay of the gradient difference (Adan); 0 switches it off.
      rho: share of v in the denominator; the rest is vbar (1: Adam, 0: AVGrad or AMSGrad).
      c: 1 for Adam's second moment, 0 for Yogi's.
      gamma: share of the adaptive direction; the rest is Lion's sign direction.
    """

    beta1: Any
    beta2: Any
    beta3: Any
    rho: Any
    c: Any
    gamma: Any


class Moments(NamedTuple):
    """The buffers that a step starts from; ``None`` where the coefficients never need one.

    Attributes:
      m: first moment.
      v: second moment.
      vbar: running average (AVGrad) or running maximum (AMSGrad) of v.
      n: moving average of the gradient difference (Adan).
      lion: Lion's moving average.
      gradient: the gradient of the step before.
    """

    m: Any = None
    v: Any = None
    vbar: Any = None
    n: Any = None
    lion: Any = None
    gradient: Any = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """The choices in the step that are no coefficients.

    Attributes:
      second_moment: vbar is the running average ("avg") or the running maximum ("max") of v.
      max_after_correction: with "max", take it of the bias-corrected v (as optax.amsgrad does).
      diff_bias_correction: divide n by 1 - beta3^t (as Adan's code does; MADA's does not).
      official: reproduce the authors' code: Lion's sign reads the buffer after its update, and
        vbar counts as a constant in the hyper-gradient.
    """

    second_moment: Literal["avg", "max"] = "avg"
    max_after_correction: bool = False
    diff_bias_correction: bool = False
    official: bool = False


class StepScalars(NamedTuple):
    """What one step knows besides its buffers, prepared once for all leaves.

    ``k`` holds the bias corrections 1 - beta^t for beta1, beta2, beta3 and ``dk`` their negative
    derivatives t beta^(t-1).
    """

    hyper: MadaHyperparams
    t: Scalar
    k: tuple[Scalar, Scalar, Scalar]
    dk: tuple[Scalar, Scalar, Scalar]
    eps: Scalar
    lion_b1: Scalar
    lion_b2: Scalar


def step_scalars(
    hyper: MadaHyperparams, count: jax.Array, eps: Scalar, lion_b1: Scalar, lion_b2: Scalar, dtype
) -> StepScalars:
    """Scalars of step number ``count`` (an integer, counted from 1), prepared in ``dtype``."""
    betas = (hyper.beta1, hyper.beta2, hyper.beta3)
    t = count.astype(dtype)
    k1, k2, k3 = ((1 - beta**count).astype(dtype) for beta in betas)
    dk1, dk2, dk3 = (t * (beta ** (count - 1)).astype(dtype) for beta in betas)
    return StepScalars(hyper, t, (k1, k2, k3), (dk1, dk2, dk3), eps, lion_b1, lion_b2)


def is_fixed_at(coefficient: Scalar, value: float) -> bool:
    """Whether a coefficient is a static number equal to ``value``."""
    return isinstance(coefficient, (int, float)) and coefficient == value


def inner_step(moments: Moments, g: jax.Array, s: StepScalars, rule: Rule):
    """One step S(moments, g; h), elementwise.

    Args:
      moments: the buffers before the step.
      g: the gradient of the step.
      s: scalars of the step.
      rule: choices that are no coefficients.

    Returns:
      The buffers after the step, and the direction D (the parameters move by ``-lr * D``).
    """
    h = s.hyper
    adaptive = sign = None
    if moments.m is not None:
        m = (1 - h.beta1) * g + h.beta1 * moments.m
        _, d, q = _second_moment_input(moments, g, h)
        v = (1 - h.beta2) * q + h.beta2 * moments.v
        n = None if moments.n is None else (1 - h.beta3) * d + h.beta3 * moments.n
        vbar = None if moments.vbar is None else _running(moments.vbar, v, s, rule)
        numerator, vhat = _corrected(m, v, vbar, n, s, rule)
        adaptive = numerator / (jnp.sqrt(vhat) + s.eps)
        moments = moments._replace(m=m, v=v, vbar=vbar, n=n)
    if moments.lion is not None:
        lion = (1 - s.lion_b2) * g + s.lion_b2 * moments.lion
        base = lion if rule.official else moments.lion
        sign = jnp.sign((1 - s.lion_b1) * g + s.lion_b1 * base)
        moments = moments._replace(lion=lion)
    if moments.gradient is not None:
        moments = moments._replace(gradient=g)
    if sign is None:
        return moments, adaptive
    if adaptive is None:
        return moments, sign
    return moments, h.gamma * adaptive + (1 - h.gamma) * sign


def direction_gradient(
    moments: Moments, g: jax.Array, s: StepScalars, rule: Rule, learned: Sequence[str]
) -> list[jax.Array]:
    """dD/dh of one step at fixed buffers and gradient, elementwise, in closed form.

    Args:
      moments: the buffers before the step.
      g: the gradient of the step.
      s: scalars of the step.
      rule: choices that are no coefficients.
      learned: names of the coefficients to differentiate by.

    Returns:
      One array per name, in the order of ``learned``. d sign = 0 everywhere, and the derivative
      through sqrt(vhat) counts as 0 where vhat = 0 (a coordinate that never had a gradient).
    """
    h, (k1, k2, k3), (dk1, dk2, dk3) = s.hyper, s.k, s.dk
    ghat, d, q = _second_moment_input(moments, g, h)
    after, _ = inner_step(moments, g, s, rule)
    m, v, vbar, n = after.m, after.v, after.vbar, after.n
    numerator, vhat = _corrected(m, v, vbar, n, s, rule)
    root = jnp.sqrt(vhat)
    a = 1 / (root + s.eps)  # d adaptive / d numerator
    live = vhat > 0
    r = jnp.where(live, -numerator * a * a / (2 * jnp.where(live, root, 1)), 0)  # d / d vhat

    # w = k2 * d vhat / d v: directly (rho), and through vbar.
    if vbar is None:
        w = 1.0
    elif rule.official:
        w = h.rho
    elif rule.second_moment == "avg":
        w = h.rho + (1 - h.rho) / s.t
    else:
        reached = v / k2 > moments.vbar if rule.max_after_correction else v > moments.vbar
        w = h.rho + (1 - h.rho) * reached
    sgn = jnp.sign(ghat * ghat - moments.v)
    dq_dghat = 2 * ghat * (h.c + (1 - h.c) * sgn)
    dv = r * (w / k2)  # d adaptive / d v
    corrected_after = rule.second_moment == "max" and rule.max_after_correction
    n_k = k3 if rule.diff_bias_correction else 1.0

    def beta1():
        return (h.gamma / k1) * a * (moments.m - g + m * (dk1 / k1))

    def beta2():
        through_k2 = w * v / k2 if corrected_after else vhat
        return h.gamma * (dv * (moments.v - q) + r * through_k2 * (dk2 / k2))

    def beta3():
        through_n = n / n_k + h.beta3 * (moments.n - d) / n_k
        if rule.diff_bias_correction:
            through_n = through_n + h.beta3 * n * (dk3 / (k3 * k3))
        return h.gamma * (a * through_n + dv * (1 - h.beta2) * dq_dghat * d)

    def rho():
        if corrected_after:
            return h.gamma * r * (v / k2 - vbar)
        return (h.gamma / k2) * r * (v - vbar)

    def c():
        return h.gamma * dv * (1 - h.beta2) * (ghat * ghat * (1 - sgn) - moments.v)

    def gamma():
        base = after.lion if rule.official else moments.lion
        return numerator * a - jnp.sign((1 - s.lion_b1) * g + s.lion_b1 * base)

    formulas = dict(beta1=beta1, beta2=beta2, beta3=beta3, rho=rho, c=c, gamma=gamma)
    return [formulas[name]() for name in learned]


def _second_moment_input(moments, g, h):
    """The weighted gradient ghat, the difference d, and q (Adam's and Yogi's), which v averages."""
    d = None if moments.gradient is None else g - moments.gradient
    ghat = g if d is None else g + h.beta3 * d
    square = ghat * ghat
    if is_fixed_at(h.c, 1):
        return ghat, d, square
    yogi = moments.v + square * jnp.sign(square - moments.v)
    return ghat, d, h.c * square + (1 - h.c) * yogi


def _running(vbar, v, s, rule):
    """Running average of v (AVGrad), or its running maximum (AMSGrad)."""
    if rule.second_moment == "avg":
        return vbar + (v - vbar) * (1 / s.t)  # a scalar division, not one per element
    return jnp.maximum(vbar, v / s.k[1] if rule.max_after_correction else v)


def _corrected(m, v, vbar, n, s, rule):
    """The numerator mhat + beta3 n and the mixed, bias-corrected second moment vhat."""
    h, (k1, k2, k3) = s.hyper, s.k
    numerator = m / k1
    if n is not None:
        numerator = numerator + h.beta3 * (n / k3 if rule.diff_bias_correction else n)
    if vbar is None:
        return numerator, v / k2
    if rule.second_moment == "max" and rule.max_after_correction:
        return numerator, h.rho * (v / k2) + (1 - h.rho) * vbar
    return numerator, (h.rho * v + (1 - h.rho) * vbar) / k2


def begin(moments: Moments, g: jax.Array, first: Scalar, rule: Rule) -> Moments:
    """Give the very first step its previous gradient: g itself, so that the difference is 0.

    The authors' code takes 0 as the previous gradient and starts n at g * g.
    """
    if moments.gradient is not None and not rule.official:
        moments = moments._replace(gradient=jnp.where(first, g, moments.gradient))
    if moments.n is not None and rule.official:
        moments = moments._replace(n=jnp.where(first, g * g, moments.n))
    return moments


def _redo(moments, g, s, rule, first):
    """The buffers after a step, from its inputs; as they are when there was no step yet."""
    after, _ = inner_step(moments, g, s, rule)
    kept = jax.tree.map(lambda old, new: jnp.where(first, old, new), moments, after)
    return kept._replace(gradient=after.gradient)  # before the first step it is 0 like the old one


def step(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    s: StepScalars,
    rule: Rule,
    first: jax.Array,
) -> tuple[list[Moments], list[jax.Array]]:
    """One step with no lag, for coefficients that are all frozen (XLA fuses it into one pass).

    Args:
      moments: the buffers before the step, one :class:`Moments` per leaf.
      gradients: the gradient of the step, one array per leaf.
      s: scalars of the step.
      rule: choices that are no coefficients.
      first: whether this is the first step.

    Returns:
      The buffers after the step (in the dtypes they came in) and the directions, per leaf.
    """
    dtype = s.t.dtype
    after, directions = [], []
    for old, g in zip(moments, gradients, strict=True):
        wide, g = jax.tree.map(lambda x: x.astype(dtype), (old, g))
        new, direction = inner_step(begin(wide, g, first, rule), g, s, rule)
        after.append(jax.tree.map(lambda x, like: x.astype(like.dtype), new, old))
        directions.append(direction)
    return after, directions


def redo(
    moments: Sequence[Moments],
    gradients: Sequence[jax.Array],
    s: StepScalars,
    rule: Rule,
    first: jax.Array,
) -> list[Moments]:
    """The buffers after step t, from its inputs (arguments as :func:`lagged_step`)."""
    dtype = s.t.dtype
    wide = jax.tree.map(lambda x: x.astype(dtype), list(zip(moments, gradients, strict=True)))
    return [_redo(mo, g, s, rule, first) for mo, g in wide]


def products(s, leaf, rule, learned):
    """The products cotangent * dD/dh on one leaf (or one block of it), before it is summed."""
    moments, g, cotangent = leaf
    return [cotangent * x for x in direction_gradient(moments, g, s, rule, learned)]


def lagged(scalars, leaf, rule):
    """Both steps on one leaf (or one block of it)."""
    s, s_next, first = scalars
    storage = leaf[0]
    moments, g, g_next = jax.tree.map(lambda x: x.astype(s.t.dtype), leaf)
    after = begin(_redo(moments, g, s, rule, first != 0), g_next, first != 0, rule)
    stored = jax.tree.map(lambda x, like: x.astype(like.dtype), after, storage)
    # A buffer stored in a shorter format must be what the next call finds.
    after = jax.tree.map(lambda x: x.astype(s.t.dtype), stored)
    _, direction = inner_step(after, g_next, s_next, rule)
    return stored, direction
