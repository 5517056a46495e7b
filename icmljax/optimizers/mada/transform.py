"""The optax transformation: what the state keeps, and the descent of the coefficients."""

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
        traced = [name for name in self._MAYBE_TRACED if not is_number(getattr(self, name))]
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
    check_range("eps", eps, 0.0, np.inf)
    check_range("lion_b1", lion_b1, 0.0, 1.0)
    check_range("lion_b2", lion_b2, 0.0, 1.0)
    check_range("hyper_start_step", hyper_start_step, 0, np.inf)
    if hyper_grad_clip is not None:
        check_range("hyper_grad_clip", hyper_grad_clip, 0.0, np.inf)
    for name in NAMES:
        low, high = getattr(box, name)
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"bounds of {name} are ({low}, {high}); expected 0 <= low <= high <= 1"
            )
        if name in frozen:
            low, high = 0.0, 1.0  # the box is where a coefficient may go, and this one stays
        check_range(f"init.{name}", getattr(start, name), low, high)
        check_range(f"hyper_momentum.{name}", getattr(momentum, name), 0.0, 1.0)
        if not callable(getattr(hyper_lr, name)):
            check_range(f"hyper_learning_rate.{name}", getattr(hyper_lr, name), 0.0, np.inf)

    fixed = {n: getattr(start, n) for n in frozen if is_number(getattr(start, n))}
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
        gradients, treedef = flatten_like(updates, state, "the gradients")
        moments = per_leaf(state.moments, treedef)
        first = state.count == 0
        count = optax.safe_increment(state.count)
        dtype = state.learning_rate.dtype
        if learned:
            cotangents = gradients
            if hyper_grads is not None:
                own = mask_like(hyper_grads, state.gradient)
                cotangents, _ = flatten_like(own, state, "hyper_grads")
            last_gradients = treedef.flatten_up_to(state.gradient)
            last = last_step(state)
            hg = weighted_sums(
                state, last, moments, last_gradients, cotangents, axis_name, implementation
            )
            state = descend(state, hg)
            now = _scalars(state.hyper, settings, count, dtype)
            # Without it, XLA starts the step before the sums have read the (donated) buffers, and
            # copies all of them.
            last, first = _wait_for(getattr(state.hyper, learned[0]), (last, first))
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
            moments=per_tree(moments, state.moments, treedef),
            settings=settings,
        )
        return treedef.unflatten(directions), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# ----------------------------------------------------------------------------------- internals


def weighted_sums(
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


def last_step(state: MadaState) -> StepScalars:
    """Scalars of the last step (before the first one: of step 1, to keep them finite)."""
    count = jnp.maximum(state.count, 1)
    return _scalars(state.hyper, state.settings, count, state.learning_rate.dtype)


def _wait_for(other, tree):
    """Make ``tree`` depend on ``other`` (XLA drops optimization barriers before it schedules)."""
    never = jnp.isinf(other) & jnp.isnan(other)
    return jax.tree.map(lambda x: x if is_number(x) else jnp.where(never, 0, x), tree)


def _scalars(hyper, settings, count, dtype) -> StepScalars:
    hyper = hyper._replace(**dict(settings.fixed))
    return mada_step.step_scalars(
        hyper, count, settings.eps, settings.lion_b1, settings.lion_b2, dtype
    )


def per_leaf(moments: Moments, treedef) -> list[Moments]:
    """A Moments of trees as one Moments per leaf."""
    columns = [None if tree is None else treedef.flatten_up_to(tree) for tree in moments]
    return [
        Moments(*(None if column is None else column[i] for column in columns))
        for i in range(treedef.num_leaves)
    ]


def per_tree(leaves: list[Moments], like: Moments, treedef) -> Moments:
    """The inverse of :func:`per_leaf`; ``like`` says which buffers there are."""
    return Moments(
        *(
            None if tree is None else treedef.unflatten([leaf[k] for leaf in leaves])
            for k, tree in enumerate(like)
        )
    )


def flatten_like(tree, state, what):
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


def mask_like(tree, like):
    """``tree`` with optax.MaskedNode wherever ``like`` has it."""

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)

    if not any(map(is_masked, jax.tree.leaves(like, is_leaf=is_masked))):
        return tree
    return jax.tree.map(lambda a, b: a if is_masked(a) else b, like, tree, is_leaf=is_masked)


def _clip_magnitude(x, bound, official):
    if bound is None:
        return x
    if official:  # torch.nn.utils.clip_grad_norm_
        return x * jnp.minimum(1.0, bound / (jnp.abs(x) + 1e-6))
    return jnp.clip(x, -bound, bound)


def _at(value, count):
    return value(count) if callable(value) else value


def is_number(x) -> bool:
    """Whether a value is a number on the host, on which code may specialise."""
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


def check_range(name, value, low, high):
    """Check a concrete number; traced and batched values are the caller's to check."""
    if is_number(value) and not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected a number in [{low}, {high}]")


def _check_leaves(params):
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"parameter {name!r} has dtype {jnp.result_type(x)}; MADA needs real floating "
                "point: cast it, or exclude it with optax.masked"
            )
