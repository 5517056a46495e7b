"""The hyper-gradient of MADA, and the descent of the coefficients on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.optimizers.mada import (
    BOX,
    DEFAULT_INIT,
    NAMES,
    MadaHyperparams,
    hyper_gradient,
    mada,
    scale_by_mada,
)
from tests.optimizers.common import (
    INTERIOR,
    assert_equal,
    mada_state,
    quadratic,
    random_tree,
    replay,
    stacked,
    train,
)

RULES = {
    "avg": dict(),
    "max": dict(second_moment="max"),
    "max_after_correction": dict(second_moment="max", max_after_correction=True),
    "diff_bias_correction": dict(diff_bias_correction=True),
}
# Interior, and on the boundary of each coefficient's box (beta3, rho, c and gamma on both).
POINTS = [
    INTERIOR,
    MadaHyperparams(0.99, 0.501, 0.0, 1.0, 1.0, 1.0),
    MadaHyperparams(0.01, 0.99, 0.99, 0.0, 0.0, 0.9),
    MadaHyperparams(0.5, 0.7, 0.6, 0.2, 0.5, 0.0),
]


def _dot(a, b):
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)))


def _differences(f, point, width=3e-7):
    """Second-order differences of f by each coefficient, all inside the box."""
    h = jnp.stack(point)
    sign = jnp.where(h >= jnp.asarray(BOX)[:, 1], -1.0, 1.0)

    def moved(k):
        steps = k * width * jnp.diag(sign)
        return jax.vmap(lambda e: f(MadaHyperparams(*(h + e))))(steps)

    return sign * (4 * moved(1) - moved(2) - 3 * moved(0)) / (2 * width)


def _at(tree, t):
    return jax.tree.map(lambda x: x[t], tree)


@pytest.mark.parametrize("name", RULES)
def test_hyper_gradient_is_the_derivative_of_the_next_inner_product(name):
    """d <g_{t+1}, x_t(h)> / dh at fixed state before step t, for t = 1 to 4."""

    @jax.jit
    def compare(point, grads):
        learned = scale_by_mada(
            lambda count: 0.4 / (count + 1), point, hyper_learning_rate=0.0, **RULES[name]
        )
        static = scale_by_mada(init=point, frozen=NAMES, **RULES[name])
        _, _, states = replay(learned, grads)
        _, _, before = replay(static, grads)
        start = static.init(_at(grads, 0))
        before = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, before)

        def at_step(t):  # it is given row t - 1
            g, g_next = _at(grads, t - 1), _at(grads, t)

            def inner_product(h):
                direction, _ = static.update(g, _at(before, t - 1)._replace(hyper=h))
                return -0.4 / t * _dot(g_next, direction)

            exact = hyper_gradient(_at(states, t - 1), g_next)
            return jnp.stack(exact), _differences(inner_product, point)

        return jax.vmap(at_step)(jnp.arange(1, 5))

    shapes = None if name == "avg" else {"w": (5, 3)}
    with jax.enable_x64(True):
        grads = random_tree(3, 5, dtype=np.float64, shapes=shapes)
        grads["w"][:4, :, 2] = 0  # dead coordinates, until the last gradient
        for point in POINTS:
            exact, differences = compare(MadaHyperparams(*map(jnp.float64, point)), grads)
            assert np.isfinite(exact).all()
            # Rounding: 1e-15 over the width 3e-7; truncation: (3e-7 / 0.01)^2 at beta2 = 0.99.
            np.testing.assert_allclose(exact, differences, rtol=1e-6, atol=2e-8)
            moving = np.abs(exact).max(axis=0) > 1e-6
            assert moving.sum() >= (4 if point.gamma else 1)


def test_hyper_gradient_is_the_derivative_of_the_loss():
    """d loss_{t+1}(x_t(h)) / dh on a closed loop; weight decay does not depend on h."""
    with jax.enable_x64(True):
        loss, params, noise = quadratic(dtype=np.float64, shapes={"w": (5, 3)})
        point = MadaHyperparams(*map(jnp.float64, INTERIOR))
        static = mada(0.05, point, frozen=NAMES, weight_decay=0.1)
        learned = mada(0.05, INTERIOR, hyper_learning_rate=0.0, weight_decay=0.1)

        @jax.jit
        def compare():
            (x, before), _ = train(static, loss, params, _at(noise, slice(6)))
            (x_next, state), _ = train(learned, loss, params, _at(noise, slice(7)))
            own, *rest = before

            def next_loss(h):
                g = jax.grad(loss)(x, _at(noise, 6))
                updates, _ = static.update(g, (own._replace(hyper=h), *rest), x)
                return loss(jax.tree.map(jnp.add, x, updates), _at(noise, 7))

            exact = hyper_gradient(state, jax.grad(loss)(x_next, _at(noise, 7)))
            return jnp.stack(exact), _differences(next_loss, point, 1e-5)

        exact, differences = compare()
    assert (np.abs(exact) > 1e-5).all()
    # The loss is about 30: its rounding over a width of 1e-5, and the width squared.
    np.testing.assert_allclose(exact, differences, rtol=1e-6, atol=3e-9)


def test_hyper_gradient_before_the_first_update_is_zero():
    grads = jnp.ones(4)
    state = mada(0.1, eps=0.0).init(grads)  # where every term is 0 / 0
    assert stacked(hyper_gradient(state, grads)).tolist() == [0.0] * 6


# ------------------------------------------------------------------------------- the descent
# One program serves most tests: what differs between them are its arguments.

STEPS = 12
DEFAULTS = dict(
    learning_rate=np.full(STEPS, 0.1),
    init=np.array(INTERIOR),
    hyper_learning_rate=np.full((STEPS, 6), 0.01),
    hyper_momentum=0.0,
    hyper_start_step=0,
    hyper_grad_clip=np.inf,
    eps=1e-6,
)


def _optimizer(knobs, normalization=None, bounds=()):
    rates = knobs["hyper_learning_rate"]
    return scale_by_mada(
        lambda count: knobs["learning_rate"][count],
        MadaHyperparams(*knobs["init"]),
        hyper_learning_rate=MadaHyperparams(*(lambda t, k=k: rates[t, k] for k in range(6))),
        hyper_normalization=normalization,
        bounds=dict(bounds),
        **{n: knobs[n] for n in ("hyper_momentum", "hyper_start_step", "hyper_grad_clip", "eps")},
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _run(grads, knobs, normalization, bounds):
    states = replay(_optimizer(knobs, normalization, bounds), grads)[2]
    said = jax.vmap(hyper_gradient)(_at(states, slice(-1)), _at(grads, slice(1, None)))
    coefficients = (states.hyper, states.hyper_gradient, states.velocity, said)
    stack = functools.partial(jnp.stack, axis=-1)
    return *map(stack, coefficients), states.skipped, states.hyper_scale


def _descend(grads, *, normalization=None, bounds=(), **knobs):
    """Replay; a dict of what each step had: coefficients are rows of six."""
    knobs = jax.tree.map(np.float32, DEFAULTS | knobs) | {
        "hyper_start_step": np.int32(knobs.get("hyper_start_step", 0))
    }
    names = ("hyper", "used", "velocity", "said", "skipped", "scale")
    found = _run(grads, knobs, normalization, bounds)
    return {name: jax.tree.map(np.asarray, x) for name, x in zip(names, found, strict=True)}


def _grads(seed=1, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=(STEPS, 24)).astype(np.float32)


def test_descent_with_momentum():
    """What hyper_gradient() says is what the next update consumes; velocity; box; in this order."""
    found = _descend(_grads(), hyper_momentum=0.5)
    hyper, used = found["hyper"], found["used"]
    assert (used[0] == 0).all()
    np.testing.assert_allclose(used[1:], found["said"], rtol=1e-4, atol=1e-6)
    low, high = np.array(BOX).T
    velocity = np.zeros(6)
    for t in range(1, STEPS):
        velocity = 0.5 * velocity + used[t]
        np.testing.assert_allclose(found["velocity"][t], velocity, rtol=1e-5, atol=1e-6)
        expected = np.clip(hyper[t - 1] - 0.01 * velocity, low, high)
        np.testing.assert_allclose(hyper[t], expected, rtol=1e-6)
    assert (np.ptp(hyper, axis=0) > 1e-4).all()


def test_learning_rate_of_zero_gives_no_hyper_gradient():
    rate = np.where(np.arange(STEPS) < 4, 0.0, 0.1)
    used = _descend(_grads(), learning_rate=rate)["used"]
    # Row 4 is the slope of update 3, which moved nothing.
    assert (used[:5] == 0).all() and (used[5:] != 0).all()


def test_hyper_start_step():
    hyper = _descend(_grads(), hyper_start_step=5)["hyper"]
    assert_equal(hyper[:5], np.broadcast_to(np.float32(INTERIOR), (5, 6)))
    assert (hyper[5] != hyper[4]).all()


def test_hyper_grad_clip():
    grads = _grads(scale=100)
    assert np.abs(_descend(grads)["used"]).max() > 10
    assert np.abs(_descend(grads, hyper_grad_clip=0.5)["used"]).max() == 0.5


def test_hyper_learning_rate_may_be_a_schedule():
    rates = np.zeros((STEPS, 6))
    rates[:, NAMES.index("beta1")] = 0.1
    rates[:6, NAMES.index("rho")] = 1e-3
    hyper = _descend(_grads(), hyper_learning_rate=rates)["hyper"]
    changed = dict(zip(NAMES, np.diff(hyper, axis=0).T != 0, strict=True))
    # At step 1 v and vbar are the same, so the slope by rho is 0.
    assert changed["rho"].tolist() == [False] + [True] * 4 + [False] * 6
    assert changed["beta1"].any() and not changed["beta2"].any() and not changed["gamma"].any()


@pytest.mark.parametrize("normalization", ["sign", "ema", None])
def test_normalised_descent_is_free_of_the_loss_scale(normalization):
    """With eps = 0 the direction does not see the scale; a power of two scales without rounding."""
    init = np.array(INTERIOR._replace(c=1.0))
    rates = np.full((STEPS, 6), 2e-3)
    knobs = dict(init=init, eps=0.0, hyper_momentum=0.5, hyper_learning_rate=rates)
    plain = _descend(_grads(), normalization=normalization, **knobs)
    scaled = _descend(_grads(scale=1024), normalization=normalization, **knobs)
    assert (plain["skipped"] == 0).all()  # nor is there a 0 / 0 before the first step
    # c stays at the boundary where this seed pushes it; all others move.
    assert (np.ptp(plain["hyper"], axis=0) > 0).sum() >= 5
    if normalization is None:
        assert_equal(scaled["used"][1], 1024 * plain["used"][1])
        assert np.abs(scaled["hyper"] - plain["hyper"]).max() > 0.1
    else:
        assert_equal(scaled["hyper"], plain["hyper"])


def test_hyper_gradient_scales_with_the_loss():
    init = np.array(INTERIOR._replace(c=1.0))
    knobs = dict(init=init, eps=0.0, hyper_learning_rate=np.zeros((STEPS, 6)))
    used = _descend(_grads(), **knobs)["used"]
    assert (used[2:] != 0).all()
    assert_equal(_descend(_grads(scale=8), **knobs)["used"], 8 * used)


def test_sign_moves_by_the_hyper_learning_rate_until_the_box():
    hyper = _descend(_grads(), normalization="sign", hyper_learning_rate=np.full((STEPS, 6), 0.25))[
        "hyper"
    ]
    low, high = np.float32(BOX).T
    at_box = (hyper == low) | (hyper == high)
    assert (hyper >= low).all() and (hyper <= high).all() and at_box.any(axis=0).all()
    moves = np.abs(np.diff(hyper, axis=0))[1:]  # some slopes are 0 at step 1
    assert ((np.abs(moves - 0.25) < 1e-6) | at_box[2:]).all()


def test_ema_divides_by_the_average_magnitude():
    rates = np.full((STEPS, 6), 1e-3)
    found = _descend(_grads(), normalization="ema", hyper_learning_rate=rates)
    used, hyper = found["used"], found["hyper"]
    for k, scale in enumerate(found["scale"]):
        average = 0.0
        for t in range(1, STEPS):
            slope = np.abs(used[t, k])
            average = 0.9 * average + 0.1 * slope if average else slope
            np.testing.assert_allclose(scale[t], average, rtol=1e-5)
            ratio = used[t, k] / average if average else 0.0
            np.testing.assert_allclose(hyper[t, k], hyper[t - 1, k] - 1e-3 * ratio, atol=2e-7)


# ------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize("seed", range(3))
def test_coefficients_stay_in_their_box(seed):
    rates = np.broadcast_to(np.random.default_rng(seed).uniform(100, 1000, 6), (STEPS, 6))
    bounds = {"rho": (0.2, 0.7)}
    hyper = _descend(
        _grads(seed), bounds=tuple(bounds.items()), hyper_learning_rate=rates, hyper_momentum=0.9
    )["hyper"]
    low, high = np.float32(BOX._replace(**bounds)).T
    assert (hyper >= low).all() and (hyper <= high).all()
    assert ((hyper == low) | (hyper == high)).any(axis=0).all()  # the box was needed


@pytest.mark.parametrize("c", [1.0, 0.0, 0.5])
def test_average_grows_as_amsgrad_asks(c):
    """t vbar_t never decreases, and vbar stays below the running maximum of v."""
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(60, 200)) * np.exp(rng.normal(size=(60, 1)))
    optimizer = scale_by_mada(init=DEFAULT_INIT._replace(c=c, beta2=0.6), frozen=NAMES)
    moments = jax.jit(lambda g: replay(optimizer, g)[2].moments)(grads.astype(np.float32))
    v, vbar = np.asarray(moments.v), np.asarray(moments.vbar)
    total = vbar * np.arange(1, 61)[:, None]
    assert (np.diff(v, axis=0) < 0).any()
    assert (np.diff(total, axis=0) >= -1e-6 * total[1:]).all()
    assert (vbar <= np.maximum.accumulate(v, axis=0) * (1 + 1e-6)).all()


def test_order_and_division_of_the_parameters_do_not_matter():
    rng = np.random.default_rng(4)
    whole = rng.normal(size=(STEPS, 9000)).astype(np.float32)

    @jax.jit
    def trajectory(grads):
        optimizer = mada(0.003, INTERIOR, hyper_start_step=0)
        return jnp.stack(mada_state(replay(optimizer, grads)[2]).hyper, axis=-1)

    expected = trajectory([whole])
    assert np.ptp(expected, axis=0).min() > 1e-4
    matrix, rest = whole[:, :3000].reshape(STEPS, 30, 100), whole[:, 3001:]
    # Sums of 9000 float32 terms in another order.
    np.testing.assert_allclose(
        trajectory({"a": matrix, "b": whole[:, 3000], "c": rest}), expected, atol=1e-6
    )
    np.testing.assert_allclose(trajectory([whole[:, rng.permutation(9000)]]), expected, atol=1e-6)


def test_zero_gradient_keeps_the_coefficients():
    grads = _grads()
    grads[7] = 0
    hyper = _descend(grads)["hyper"]
    assert (hyper[6] != hyper[5]).any() and (hyper[8] != hyper[7]).any()
    assert_equal(hyper[7], hyper[6])


def test_non_finite_hyper_gradient_is_skipped_and_counted():
    grads = _grads()
    grads[8, 3] = np.inf
    found = _descend(grads, hyper_momentum=0.5)
    hyper, velocity = found["hyper"], found["velocity"]
    assert np.isfinite(hyper).all() and np.isfinite(velocity).all()
    # From then on the moments are not finite, as those of any optax optimizer.
    assert found["skipped"].tolist() == [0] * 8 + [1, 2, 3, 4]
    assert (hyper[7] != hyper[6]).any()
    assert_equal(hyper[8:], np.broadcast_to(hyper[7], (4, 6)))
    assert_equal(velocity[8:], np.broadcast_to(velocity[7], (4, 6)))


def test_hyper_grads_moves_the_coefficients_and_nothing_else():
    grads, other = _grads(), jnp.asarray(_grads(2)[0])

    @jax.jit
    def run(grads, other):
        optimizer = _optimizer(jax.tree.map(jnp.asarray, DEFAULTS))
        state, _, _ = replay(optimizer, grads[:-1])
        _, own = optimizer.update(grads[-1], state)
        _, overridden = optimizer.update(grads[-1], state, hyper_grads=other)
        return hyper_gradient(state, other), own, overridden

    said, own, overridden = run(grads, other)
    # The same sum of 24 terms in one program.
    np.testing.assert_allclose(stacked(overridden.hyper_gradient), stacked(said), rtol=1e-4)
    assert (np.abs(stacked(own.hyper_gradient) - stacked(said)) > 1e-6).all()
    assert_equal((own.moments, own.gradient), (overridden.moments, overridden.gradient))
