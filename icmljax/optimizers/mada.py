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

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from icmljax.kernels import mada_step
from icmljax.kernels.mada_step import MadaHyperparams, Moments, Rule, StepScalars

__all__ = [
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

NAMES = MadaHyperparams._fields
DEFAULT_INIT = MadaHyperparams(0.9, 0.95, 0.0, 0.6, 1.0, 1.0)
DEFAULT_HYPER_LEARNING_RATE = MadaHyperparams(5e-4, 5e-4, 0.1, 0.1, 0.1, 0.1)
BOX = MadaHyperparams((0.01, 0.99), (0.501, 0.99), (0.0, 0.99), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))

_OFFICIAL_START = 1e-15  # what the authors' code starts v and vbar from
_NORMALIZER_DECAY = 0.9  # of the average |hyper-gradient| that "ema" divides by

PerCoefficient = MadaHyperparams | Mapping[str, Any] | Any  # all six, some by name, one for all


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Settings:
    """What a step was taken with, besides h and the learning rate.

    Python numbers are static; arrays (as optax.inject_hyperparams gives) are leaves.

    Attributes:
        rule: choices that are no coefficients.
        learned: names of the coefficients that descend the hyper-gradient.
        fixed: the coefficients frozen at Python numbers, on which the step is specialised.
        eps: added to sqrt(vhat).
        lion_b1: weight of Lion's buffer in its sign direction.
        lion_b2: decay of Lion's buffer.
    """

    rule: Rule
    learned: tuple[str, ...]
    fixed: tuple[tuple[str, float], ...]
    eps: Any
    lion_b1: Any
    lion_b2: Any

    _MAYBE_TRACED = ("eps", "lion_b1", "lion_b2")

    def tree_flatten_with_keys(self):
        """Arrays are children, all the rest is static."""
        traced = [name for name in self._MAYBE_TRACED if not _is_number(getattr(self, name))]
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in traced]
        static = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in traced
        }
        return children, (tuple(traced), tuple(static.items()))

    @classmethod
    def tree_unflatten(cls, static, children):
        """The inverse."""
        traced, rest = static
        return cls(**dict(rest), **dict(zip(traced, children, strict=True)))


class MadaState(NamedTuple):
    """State of :func:`scale_by_mada`.

    Attributes:
        count: number of updates so far.
        hyper: the coefficients that the last update used.
        velocity: momentum of the coefficients' descent.
        hyper_gradient: the hyper-gradient that the last update consumed (0 where it did not).
        hyper_scale: average |hyper-gradient|, for ``hyper_normalization="ema"`` only.
        skipped: number of updates whose hyper-gradient was not finite, and so was not used.
        learning_rate: the learning rate of the last update.
        moments: buffers of the *start* of the last update if any coefficient is learned, else of
            its end. Unneeded ones are None.
        gradient: the gradient of the last update if any coefficient is learned, else None.
        settings: what the last update was taken with.
    """

    count: chex.Array
    hyper: MadaHyperparams
    velocity: MadaHyperparams
    hyper_gradient: MadaHyperparams
    hyper_scale: MadaHyperparams | None
    skipped: chex.Array
    learning_rate: chex.Array
    moments: Moments
    gradient: Any
    settings: Settings


def scale_by_mada(
    learning_rate_for_hypergrad: optax.ScalarOrSchedule = 1.0,
    init: PerCoefficient = DEFAULT_INIT,
    *,
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
    """Rescale gradients by MADA's direction D, learning its coefficients on the way.

    Follow it in a chain by ``optax.scale_by_learning_rate`` with the *same* learning rate: the
    hyper-gradient is of the loss after the step ``-lr D``. A transformation after it that rescales
    by anything else (a trust ratio, lookahead) makes the hyper-gradient wrong; decoupled weight
    decay does not, nor does clipping before it (the hyper-gradient is then of the clipped
    gradient; ``hyper_grads`` overrides). The ``update`` function takes ``hyper_grads``: another
    gradient at the current parameters for the hyper-gradient, unclipped or of a validation batch.

    Under ``optax.masked`` or ``optax.multi_transform`` each group learns its own coefficients.

    Args:
        learning_rate_for_hypergrad: the learning rate (or schedule) of the step.
        init: initial coefficients: :class:`MadaHyperparams`, or a mapping of some of them by name.
            They may be traced arrays (``vmap`` over initial points).
        hyper_learning_rate: step size of the coefficients: one for all, per coefficient, or a
            mapping by name (0 for the others); values may be schedules.
        hyper_momentum: mu in velocity = mu velocity + hyper-gradient, in [0, 1).
        hyper_normalization: use the sign of the hyper-gradient, or divide it by a running average
            of its magnitude: the step size is then free of the scale of loss, learning rate and
            model size. None: as in the paper.
        bounds: (low, high) per coefficient; coefficients are clipped to it after each descent.
        frozen: names of coefficients that stay at ``init``. Those given as Python numbers are
            specialised on: gamma=1 drops Lion's buffer, rho=1 drops vbar, beta3=0 drops n and the
            previous gradient, gamma=0 drops all but Lion's, and with all six frozen the extra
            buffer and pass go too.
        eps: added to sqrt(vhat), outside the root.
        lion_b1: weight of Lion's buffer in its sign direction, never learned.
        lion_b2: decay of Lion's buffer, never learned.
        second_moment: vbar is the running average ("avg") or maximum ("max") of v.
        max_after_correction: take that maximum after bias correction, as optax.amsgrad does.
        diff_bias_correction: bias-correct n, as Adan does.
        initial_accumulator: value that m and v start from (optax.yogi starts from 1e-6).
        hyper_start_step: the first so many updates leave the coefficients alone.
        hyper_grad_clip: bound of each coefficient's hyper-gradient; None: none.
        state_dtype: dtype of all buffers. None: that of the parameters for gradients, and at least
            float32 for moments.
        axis_name: mesh axes over which *different* elements of the parameters lie inside
            ``shard_map``; the sums are then taken over them. Not needed under ``jit``.
        compat: "official" reproduces the numbers of the authors' code instead (v and vbar start
            at 1e-15, n at g^2, the previous gradient at 0; Lion's sign reads its buffer after the
            update; vbar is a constant for the hyper-gradient).
        implementation: of the two passes over memory; see
            :func:`icmljax.kernels.mada_step.hyper_gradient_sums`.

    Returns:
        An optax transformation whose ``update`` accepts ``hyper_grads``.

    Raises:
        ValueError: a coefficient outside its box, an unknown name, a negative eps, and the like;
            from ``init``, complex or integer parameters; from ``update``, gradients of another
            tree than the parameters.

    Reference:
        Ozkara et al. 2024 (arXiv 2401.08893). The default differs from the authors' code in the
        points listed under ``compat``.
    """
    start = _per_coefficient("init", init, DEFAULT_INIT)
    hyper_lr = _per_coefficient("hyper_learning_rate", hyper_learning_rate, 0.0)
    momentum = _per_coefficient("hyper_momentum", hyper_momentum, 0.0)
    box = _per_coefficient("bounds", bounds, BOX, pairs=True)
    rule = Rule(second_moment, max_after_correction, diff_bias_correction, compat == "official")
    _check_choice("compat", compat, (None, "official"))
    _check_choice("second_moment", second_moment, ("avg", "max"))
    _check_choice("hyper_normalization", hyper_normalization, (None, "sign", "ema"))
    _check_choice("implementation", implementation, (None, "xla", "pallas"))
    if max_after_correction and second_moment != "max":
        raise ValueError('max_after_correction=True needs second_moment="max", got "avg"')
    if isinstance(frozen, str) or set(frozen) - set(NAMES):
        raise ValueError(f"frozen is {frozen!r}; expected a tuple of names from {NAMES}")
    _check_range("eps", eps, 0.0, np.inf)
    _check_range("lion_b1", lion_b1, 0.0, 1.0)
    _check_range("lion_b2", lion_b2, 0.0, 1.0)
    _check_range("hyper_start_step", hyper_start_step, 0, np.inf)
    if hyper_grad_clip is not None:
        _check_range("hyper_grad_clip", hyper_grad_clip, 0.0, np.inf)
    for name in NAMES:
        low, high = getattr(box, name)
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"bounds of {name} are ({low}, {high}); expected 0 <= low <= high <= 1"
            )
        if name in frozen:
            low, high = 0.0, 1.0  # the box is where a coefficient may go, and this one stays
        _check_range(f"init.{name}", getattr(start, name), low, high)
        _check_range(f"hyper_momentum.{name}", getattr(momentum, name), 0.0, 1.0)
        if not callable(getattr(hyper_lr, name)):
            _check_range(f"hyper_learning_rate.{name}", getattr(hyper_lr, name), 0.0, np.inf)

    fixed = {n: getattr(start, n) for n in frozen if _is_number(getattr(start, n))}
    learned = tuple(n for n in NAMES if n not in frozen and fixed.get("gamma") != 0)
    settings = Settings(rule, learned, tuple(fixed.items()), eps, lion_b1, lion_b2)

    def init_fn(params):
        _check_leaves(params)
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))

        def zeros():  # fresh arrays each time: a donated state may not hold one twice
            return MadaHyperparams(*(jnp.zeros((), dtype) for _ in NAMES))

        def buffers(value, least=None):
            def buffer(p):
                kind = state_dtype or (jnp.promote_types(p.dtype, least) if least else p.dtype)
                return jnp.full_like(p, value, dtype=kind)

            return jax.tree.map(buffer, params)

        floor = _OFFICIAL_START if rule.official else 0.0
        adaptive = fixed.get("gamma") != 0
        difference = adaptive and fixed.get("beta3") != 0
        moments = Moments(
            m=buffers(initial_accumulator, jnp.float32) if adaptive else None,
            v=buffers(initial_accumulator + floor, jnp.float32) if adaptive else None,
            vbar=buffers(floor, jnp.float32) if adaptive and fixed.get("rho") != 1 else None,
            n=buffers(0, jnp.float32) if difference else None,
            lion=buffers(0, jnp.float32) if fixed.get("gamma") != 1 else None,
            gradient=buffers(0) if difference else None,
        )
        return MadaState(
            count=jnp.zeros((), jnp.int32),
            hyper=MadaHyperparams(*(jnp.array(x, dtype) for x in start)),
            velocity=zeros(),
            hyper_gradient=zeros(),
            hyper_scale=zeros() if hyper_normalization == "ema" else None,
            skipped=jnp.zeros((), jnp.int32),
            learning_rate=jnp.zeros((), dtype),
            moments=moments,
            gradient=buffers(0) if learned else None,
            settings=settings,
        )

    def descend(state, hg):
        """One step of projected gradient descent on the learned coefficients."""
        finite = jnp.all(jnp.stack([jnp.isfinite(hg[name]) for name in learned]))
        asked = (state.count >= 1) & (state.count >= hyper_start_step)
        go = asked & finite
        hyper, velocity = state.hyper._asdict(), state.velocity._asdict()
        used = dict.fromkeys(NAMES, jnp.zeros_like(state.learning_rate))
        scale = None if state.hyper_scale is None else state.hyper_scale._asdict()
        for name in learned:
            g = _clip_magnitude(hg[name], hyper_grad_clip, rule.official)
            used[name] = jnp.where(go, g, 0)
            if hyper_normalization == "sign":
                g = jnp.sign(g)
            elif scale is not None:
                # Seeded by its first value, so that it needs no bias correction.
                average = _NORMALIZER_DECAY * scale[name] + (1 - _NORMALIZER_DECAY) * jnp.abs(g)
                average = jnp.where(scale[name] > 0, average, jnp.abs(g))
                scale[name] = jnp.where(go, average, scale[name])
                g = jnp.where(average > 0, g / jnp.where(average > 0, average, 1), 0)
            speed = getattr(momentum, name) * velocity[name] + g
            low, high = getattr(box, name)
            rate = _at(getattr(hyper_lr, name), state.count)
            moved = jnp.clip(hyper[name] - rate * speed, low, high).astype(hyper[name].dtype)
            hyper[name] = jnp.where(go, moved, hyper[name])
            velocity[name] = jnp.where(go, speed, velocity[name]).astype(velocity[name].dtype)
        return state._replace(
            hyper=MadaHyperparams(**hyper),
            velocity=MadaHyperparams(**velocity),
            hyper_gradient=MadaHyperparams(**used),
            hyper_scale=None if scale is None else MadaHyperparams(**scale),
            skipped=state.skipped + (asked & ~finite),
        )

    def update_fn(updates, state, params=None, *, hyper_grads=None, **extra_args):
        del params, extra_args
        gradients, treedef = _flatten_like(updates, state, "the gradients")
        moments = _per_leaf(state.moments, treedef)
        first = state.count == 0
        count = optax.safe_increment(state.count)
        dtype = state.learning_rate.dtype
        if learned:
            cotangents = gradients
            if hyper_grads is not None:
                own = _mask_like(hyper_grads, state.gradient)
                cotangents, _ = _flatten_like(own, state, "hyper_grads")
            last_gradients = treedef.flatten_up_to(state.gradient)
            last = _last_step(state)
            hg = _hyper_gradient(
                state, last, moments, last_gradients, cotangents, axis_name, implementation
            )
            state = descend(state, hg)
            now = _scalars(state.hyper, settings, count, dtype)
            # Without it, XLA starts the step before the sums have read the (donated) buffers, and
            # copies all of them.
            last, first = _wait_for(state.hyper.beta1, (last, first))
            moments, directions = mada_step.lagged_step(
                moments,
                last_gradients,
                gradients,
                last,
                now,
                rule,
                first,
                implementation=implementation,
            )
            kept = [g.astype(x.dtype) for g, x in zip(gradients, last_gradients, strict=True)]
            state = state._replace(gradient=treedef.unflatten(kept))
        else:
            now = _scalars(state.hyper, settings, count, dtype)
            moments, directions = mada_step.step(moments, gradients, now, rule, first)
        directions = [d.astype(g.dtype) for d, g in zip(directions, gradients, strict=True)]
        state = state._replace(
            count=count,
            learning_rate=jnp.asarray(_at(learning_rate_for_hypergrad, state.count), dtype),
            moments=_per_tree(moments, state.moments, treedef),
            settings=settings,
        )
        return treedef.unflatten(directions), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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


def hyperparams(opt_state: Any) -> MadaHyperparams | dict[str, MadaHyperparams]:
    """The coefficients that the last update used.

    Args:
        opt_state: any optimizer state that contains one or more :class:`MadaState`.

    Returns:
        The coefficients; with several states (``optax.multi_transform``), by their path.

    Raises:
        ValueError: there is none.
    """
    return _one_or_all({path: state.hyper for path, state in _find(opt_state).items()})


def hyper_gradient(opt_state: Any, grads: Any) -> MadaHyperparams | dict[str, MadaHyperparams]:
    """-lr <grads, dD/dh>: the derivative by h of the loss after the last update.

    Args:
        opt_state: any optimizer state that contains one or more :class:`MadaState`.
        grads: gradient of the loss at the present parameters, of the parameters' tree.

    Returns:
        One scalar per coefficient (0 for frozen ones), neither clipped nor normalised; with
        several states, by their path. All 0 before the first update.

    Raises:
        ValueError: there is no such state, or the trees differ.
    """
    result = {}
    for path, state in _find(opt_state).items():
        found = dict.fromkeys(NAMES, jnp.zeros_like(state.learning_rate))
        if state.settings.learned:
            own = _mask_like(grads, state.gradient)
            cotangents, _ = _flatten_like(own, state, "grads")
            gradients, treedef = jax.tree.flatten(state.gradient)
            moments = _per_leaf(state.moments, treedef)
            last = _last_step(state)
            sums = _hyper_gradient(state, last, moments, gradients, cotangents, None, None)
            found |= {name: jnp.where(state.count > 0, x, 0) for name, x in sums.items()}
        result[path] = MadaHyperparams(**found)
    return _one_or_all(result)


def freeze(
    opt_state: Any, learning_rate: optax.ScalarOrSchedule, *, restart: bool = False
) -> tuple[optax.GradientTransformationExtraArgs, optax.OptState]:
    """The static optimizer with the coefficients that were learned ("final state").

    Args:
        opt_state: a state that contains exactly one :class:`MadaState`, with concrete values.
        learning_rate: a number or a schedule, counted from the restart or from the steps taken.
        restart: start from empty buffers and step 0 instead of continuing.

    Returns:
        An optimizer with all six coefficients frozen, and its state.

    Raises:
        ValueError: there is no such state, or more than one.
    """
    found = list(_find(opt_state).values())
    if len(found) != 1:
        raise ValueError(f"freeze found {len(found)} MADA states; expected one: pass one of them")
    (state,) = found
    settings = state.settings
    optimizer = mada(
        learning_rate,
        MadaHyperparams(*(float(x) for x in state.hyper)),
        frozen=NAMES,
        eps=settings.eps,
        lion_b1=settings.lion_b1,
        lion_b2=settings.lion_b2,
        second_moment=settings.rule.second_moment,
        max_after_correction=settings.rule.max_after_correction,
        diff_bias_correction=settings.rule.diff_bias_correction,
        compat="official" if settings.rule.official else None,
    )
    like = next(tree for tree in (*state.moments, state.gradient) if tree is not None)
    start = optimizer.init(like)
    if restart:
        return optimizer, start
    moments = state.moments
    if settings.learned:
        _, treedef = jax.tree.flatten(state.gradient)
        after = mada_step.redo(
            _per_leaf(moments, treedef),
            jax.tree.leaves(state.gradient),
            _last_step(state),
            settings.rule,
            state.count == 0,
        )
        moments = _per_tree(after, moments, treedef)
    static, *rest = start
    kept = Moments(
        *(
            None if empty is None else jax.tree.map(lambda x, e: x.astype(e.dtype), full, empty)
            for empty, full in zip(static.moments, moments, strict=True)
        )
    )
    static = static._replace(count=state.count, moments=kept, learning_rate=state.learning_rate)
    rest = [  # only a schedule counts
        part._replace(count=state.count) if "count" in getattr(part, "_fields", ()) else part
        for part in rest
    ]
    return optimizer, (static, *rest)


# ----------------------------------------------------------------------------------- internals


def _with_learning_rate(direction, learning_rate, weight_decay, mask):
    _check_range("weight_decay", weight_decay, 0.0, np.inf)
    parts = [direction, optax.scale_by_learning_rate(learning_rate)]
    if not (_is_number(weight_decay) and weight_decay == 0):
        parts.insert(1, optax.add_decayed_weights(weight_decay, mask))
    return optax.chain(*parts)


def _hyper_gradient(
    state, last, moments, gradients, cotangents, axis_name, implementation
) -> dict[str, chex.Array]:
    """-lr_t sum(g_{t+1} dD_t/dh) for each learned coefficient."""
    settings = state.settings
    sums = mada_step.hyper_gradient_sums(
        moments,
        gradients,
        cotangents,
        last,
        settings.rule,
        settings.learned,
        implementation=implementation,
    )
    if axis_name is not None:
        sums = lax.psum(sums, axis_name)
    return {n: -state.learning_rate * x for n, x in zip(settings.learned, sums, strict=True)}


def _last_step(state: MadaState) -> StepScalars:
    """Scalars of the last step (before the first one: of step 1, to keep them finite)."""
    count = jnp.maximum(state.count, 1)
    return _scalars(state.hyper, state.settings, count, state.learning_rate.dtype)


def _wait_for(other, tree):
    """Make ``tree`` depend on ``other`` (XLA drops optimization barriers before it schedules)."""
    never = jnp.isinf(other) & jnp.isnan(other)
    return jax.tree.map(lambda x: x if _is_number(x) else jnp.where(never, 0, x), tree)


def _scalars(hyper, settings, count, dtype) -> StepScalars:
    hyper = hyper._replace(**dict(settings.fixed))
    return mada_step.step_scalars(
        hyper, count, settings.eps, settings.lion_b1, settings.lion_b2, dtype
    )


def _per_leaf(moments: Moments, treedef) -> list[Moments]:
    """A Moments of trees as one Moments per leaf."""
    columns = [None if tree is None else treedef.flatten_up_to(tree) for tree in moments]
    return [
        Moments(*(None if column is None else column[i] for column in columns))
        for i in range(treedef.num_leaves)
    ]


def _per_tree(leaves: list[Moments], like: Moments, treedef) -> Moments:
    """The inverse of :func:`_per_leaf`; ``like`` says which buffers there are."""
    return Moments(
        *(
            None if tree is None else treedef.unflatten([leaf[k] for leaf in leaves])
            for k, tree in enumerate(like)
        )
    )


def _flatten_like(tree, state, what):
    """Leaves of a gradient tree, which must be the tree of the state's buffers."""
    buffers = next(x for x in (*state.moments, state.gradient) if x is not None)
    expected: Any = jax.tree.structure(buffers)
    got: Any = jax.tree.structure(tree)
    if got != expected:
        raise ValueError(
            f"{what} have the tree {got}; the optimizer state was made for {expected}. Pass the "
            "gradient of the parameters given to init"
        )
    for (path, x), buffer in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(buffers), strict=True
    ):
        if jnp.shape(x) != buffer.shape:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{what} have shape {jnp.shape(x)} at {name!r}; the optimizer state has "
                f"{buffer.shape}"
            )
    leaves, treedef = jax.tree.flatten(tree)
    return [jnp.asarray(x) for x in leaves], treedef


def _mask_like(tree, like):
    """``tree`` with optax.MaskedNode wherever ``like`` has it."""

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)

    if not any(map(is_masked, jax.tree.leaves(like, is_leaf=is_masked))):
        return tree
    return jax.tree.map(lambda a, b: a if is_masked(a) else b, like, tree, is_leaf=is_masked)


def _find(opt_state) -> dict[str, MadaState]:
    def is_state(x):
        return isinstance(x, MadaState)

    pairs = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_state)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in pairs
        if is_state(x)
    }
    if not found:
        raise ValueError(f"no MADA state in an optimizer state of type {type(opt_state).__name__}")
    return found


def _one_or_all(values: dict[str, Any]):
    return next(iter(values.values())) if len(values) == 1 else values


def _clip_magnitude(x, bound, official):
    if bound is None:
        return x
    if official:  # torch.nn.utils.clip_grad_norm_
        return x * jnp.minimum(1.0, bound / (jnp.abs(x) + 1e-6))
    return jnp.clip(x, -bound, bound)


def _at(value, count):
    return value(count) if callable(value) else value


def _is_number(x) -> bool:
    return isinstance(x, (int, float, np.number))


def _per_coefficient(what, value, default, pairs=False) -> MadaHyperparams:
    """One value per coefficient from all six, some by name, or one for all."""
    if isinstance(value, MadaHyperparams):
        return value
    if isinstance(value, Mapping):
        unknown = set(value) - set(NAMES)
        if unknown:
            raise ValueError(f"{what} names {sorted(unknown)}; the coefficients are {NAMES}")
        rest = default if isinstance(default, MadaHyperparams) else [default] * len(NAMES)
        return MadaHyperparams(*rest)._replace(**value)
    if pairs or what == "init":
        raise ValueError(f"{what} is {value!r}; expected MadaHyperparams or a mapping by name")
    return MadaHyperparams(*[value] * len(NAMES))


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {choices}")


def _check_range(name, value, low, high):
    """Check a concrete number; traced and batched values are the caller's to check."""
    if _is_number(value) and not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected a number in [{low}, {high}]")


def _check_leaves(params):
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"parameter {name!r} has dtype {jnp.result_type(x)}; MADA needs real floating "
                "point: cast it, or exclude it with optax.masked"
            )
