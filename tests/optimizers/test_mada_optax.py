"""mada, avgrad and hyper_adam inside optax: wrappers, chains, masks, injected hyperparameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from icmljax.optimizers.mada import (
    avgrad,
    hyper_adam,
    hyper_gradient,
    hyperparams,
    mada,
    scale_by_mada,
)
from tests.optimizers.common import (
    INTERIOR,
    assert_close,
    assert_equal,
    mada_state,
    random_tree,
    replay,
    stacked,
)

RATE = 0.05
# On a CPU "xla" is what is chosen by itself; saying so spares the tracing of the other kernels.
LEARN = dict(hyper_start_step=0, implementation="xla")
OPTIMIZERS = {
    "mada": (mada, dict(init=INTERIOR, **LEARN)),
    "avgrad": (avgrad, dict()),
    "hyper_adam": (hyper_adam, LEARN),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)
LEARNING = pytest.mark.parametrize("name", ["mada", "hyper_adam"])
GRADS = random_tree(5, 6, shapes={"a": (4, 3)})
PARAMS = random_tree(6, shapes={"a": (4, 3)})
TWO_GRADS = random_tree(5, 6, shapes={"a": (4, 3), "b": (5,)})
TWO_PARAMS = random_tree(6, shapes={"a": (4, 3), "b": (5,)})


def make(name, rate=RATE, **options):
    function, own = OPTIMIZERS[name]
    return function(rate, **own | options)


def run(optimizer, grads=GRADS, params=PARAMS, **kwargs):
    """The updates and the last state."""
    state, updates, _ = jax.jit(lambda g, p: replay(optimizer, g, params=p, **kwargs))(
        grads, params
    )
    return updates, state


@functools.cache
def plain(name):
    return run(make(name))


@functools.cache
def plain_two(name):
    return run(make(name), TWO_GRADS, TWO_PARAMS)


def assert_same(found, expected, atol=1e-6):
    """Updates of order 0.1 and coefficients of order 1, each some roundings apart."""
    updates, state = expected
    assert_close(found[0], updates, atol=atol)
    assert_close(stacked(hyperparams(found[1])), stacked(hyperparams(state)), atol=atol)


# --------------------------------------------------------------------------------- wrappers


@EACH
def test_inject_hyperparams(name):
    function, options = OPTIMIZERS[name]
    optimizer = optax.inject_hyperparams(function)(learning_rate=RATE, **options)
    found = run(optimizer)
    assert_same(found, plain(name))
    assert found[1].hyperparams["learning_rate"] == np.float32(RATE)
    assert {"learning_rate", "eps", "weight_decay"} <= set(found[1].hyperparams)
    assert not {"beta1", "init"} & set(found[1].hyperparams)  # MADA owns its coefficients


@LEARNING
def test_injected_values_of_the_last_step_are_remembered(name):
    """Changed between two steps: the hyper-gradient is still that of the step that was taken."""
    function, options = OPTIMIZERS[name]
    optimizer = optax.inject_hyperparams(function)(learning_rate=RATE, eps=1e-6, **options)
    update = jax.jit(optimizer.update)
    state = optimizer.init(PARAMS)
    for t in range(3):
        _, state = update(jax.tree.map(lambda g, t=t: g[t], GRADS), state, PARAMS)
    g = jax.tree.map(lambda g: g[3], GRADS)
    said = hyper_gradient(state, g)
    changed = {"learning_rate": jnp.float32(1.0), "eps": jnp.float32(0.5)}
    updates, after = update(g, state._replace(hyperparams=state.hyperparams | changed), PARAMS)
    np.testing.assert_allclose(
        stacked(mada_state(after).hyper_gradient), stacked(said), rtol=1e-4, atol=1e-6
    )
    assert mada_state(after).learning_rate == 1.0
    before, _ = update(g, state, PARAMS)
    assert np.abs(updates["a"]).sum() > 4 * np.abs(before["a"]).sum()
    # And the next hyper-gradient is of the new values: the rate of 1 alone multiplies it by 20.
    _, unchanged = update(g, state, PARAMS)
    ratio = stacked(hyper_gradient(after, g))[0] / stacked(hyper_gradient(unchanged, g))[0]
    assert not np.isclose(ratio, 1 / RATE, rtol=1e-3)  # eps counts too


@EACH
def test_multi_steps(name):
    """Two halves of each gradient, accumulated."""
    halves = jax.tree.map(lambda g: jnp.stack([1.5 * g, 0.5 * g], 1).reshape(12, *g.shape[1:]),
                          GRADS)  # fmt: skip
    multi = optax.MultiSteps(make(name), every_k_schedule=2)
    updates, state = run(multi.gradient_transformation(), halves)
    assert_same((jax.tree.map(lambda u: u[1::2], updates), state), plain(name))
    assert all((u[::2] == 0).all() for u in updates.values())


@EACH
def test_masked(name):
    optimizer = optax.masked(make(name), {"a": True, "b": False})
    updates, state = run(optimizer, TWO_GRADS, TWO_PARAMS)
    alone, alone_state = run(make(name), TWO_GRADS["a"], TWO_PARAMS["a"])
    assert_close(updates["a"], alone, atol=1e-7)
    assert_equal(updates["b"], TWO_GRADS["b"])
    assert_close(hyperparams(state), hyperparams(alone_state), atol=1e-7)
    g = jax.tree.map(lambda g: g[0], TWO_GRADS)
    assert_close(hyper_gradient(state, g), hyper_gradient(alone_state, g["a"]), atol=1e-5)


@EACH
def test_multi_transform(name):
    """Each group learns coefficients of its own."""
    groups = {"first": make(name), "second": make(name, rate=2 * RATE)}
    optimizer = optax.multi_transform(groups, {"a": "first", "b": "second"})
    updates, state = run(optimizer, TWO_GRADS, TWO_PARAMS)
    alone = {"a": run(groups["first"], TWO_GRADS["a"], TWO_PARAMS["a"]),
             "b": run(groups["second"], TWO_GRADS["b"], TWO_PARAMS["b"])}  # fmt: skip
    coefficients = hyperparams(state)
    g = jax.tree.map(lambda g: g[0], TWO_GRADS)
    slopes = hyper_gradient(state, g)
    assert len(coefficients) == 2 and coefficients.keys() == slopes.keys()
    for leaf, group in (("a", "first"), ("b", "second")):
        (path,) = (path for path in coefficients if group in path)
        assert_close(updates[leaf], alone[leaf][0], atol=1e-7)
        own = alone[leaf][1]
        assert_close(coefficients[path], hyperparams(own), atol=1e-7)
        assert_close(slopes[path], hyper_gradient(own, g[leaf]), atol=1e-5)
    if name != "avgrad":
        first, second = map(stacked, coefficients.values())
        assert (first != second).any()


@EACH
def test_apply_if_finite(name):
    """A gradient that is not finite leaves no trace."""
    optimizer = optax.apply_if_finite(make(name), max_consecutive_errors=3)
    with_nan = jax.tree.map(lambda g: np.insert(g, 2, np.nan, axis=0), GRADS)
    updates, state = run(optimizer, with_nan)
    assert all((u[2] == 0).all() for u in updates.values())
    assert_same((jax.tree.map(lambda u: np.delete(u, 2, axis=0), updates), state), plain(name))
    assert mada_state(state).skipped == 0


@EACH
def test_flatten(name):
    assert_same(run(optax.flatten(make(name)), TWO_GRADS, TWO_PARAMS), plain_two(name))


@EACH
def test_parameters_may_be_missing(name):
    optimizer = make(name)
    grads = jax.tree.map(lambda g: g[0], GRADS)
    with_params, _ = jax.jit(optimizer.update)(grads, optimizer.init(PARAMS), PARAMS)
    without, _ = jax.jit(optimizer.update)(grads, optimizer.init(PARAMS))
    assert_close(with_params, without, atol=1e-8)


@EACH
def test_weight_decay_with_mask(name):
    optimizer = make(name, weight_decay=0.1, mask={"a": True, "b": False})
    updates, state = run(optimizer, TWO_GRADS, TWO_PARAMS)
    decay = RATE * 0.1 * TWO_PARAMS["a"]
    assert_same((updates | {"a": updates["a"] + decay}, state), plain_two(name))
    assert np.abs(decay).max() > 1e-3


@pytest.mark.parametrize("name", ["avgrad", "hyper_adam"])
def test_schedule_is_counted_from_zero(name):
    """The first update uses schedule(0), as everywhere in optax."""
    rates = jnp.linspace(1.0, 0.2, 6)
    optimizer = make(name, rate=lambda count: rates[count], **frozen_rates(name))
    constant = make(name, rate=1.0, **frozen_rates(name))
    updates, _ = run(optimizer)
    expected, _ = run(constant)
    for leaf, found in updates.items():
        shape = (6,) + (1,) * (found.ndim - 1)
        np.testing.assert_allclose(found, rates.reshape(shape) * expected[leaf], rtol=1e-5,
                                   atol=1e-6)  # fmt: skip


def frozen_rates(name):
    return {} if name == "avgrad" else {"hyper_learning_rate": 0.0}


# ----------------------------------------------------------------------------------- chains


@EACH
def test_chain_with_clip(name):
    """Clipping first: the optimizer sees the clipped gradient, and nothing else changes."""
    clip = optax.clip_by_global_norm(2.0)
    clipped = jax.vmap(lambda g: clip.update(g, clip.init(PARAMS))[0])(GRADS)
    found = run(optax.chain(clip, make(name)))
    expected = run(make(name), clipped)
    assert_close(found[0], expected[0], atol=1e-6)
    assert_close(hyperparams(found[1]), hyperparams(expected[1]), atol=1e-6)
    assert np.abs(found[0]["a"] - plain(name)[0]["a"]).max() > 1e-4


@LEARNING
def test_hyper_grads_override_the_clipped_gradient(name):
    """Through a chain: the hyper-gradient is that of the gradient before clipping."""
    clip = optax.clip_by_global_norm(2.0)
    optimizer = optax.chain(clip, make(name))
    g = jax.tree.map(lambda g: g[3], GRADS)
    factor = 2.0 / optax.tree.norm(g)
    assert factor < 0.9

    @jax.jit
    def fourth(grads, g):
        state, _, _ = replay(optimizer, grads, params=PARAMS)
        _, clipped = optimizer.update(g, state, PARAMS)
        _, whole = optimizer.update(g, state, PARAMS, hyper_grads=g)
        _, same = optimizer.update(g, state, PARAMS, hyper_grads=clip.update(g, None)[0])
        return mada_state(clipped), mada_state(whole), mada_state(same)

    clipped, whole, same = fourth(jax.tree.map(lambda g: g[:3], GRADS), g)
    assert_close(clipped.hyper_gradient, same.hyper_gradient, atol=1e-7)
    found, expected = stacked(clipped.hyper_gradient), factor * stacked(whole.hyper_gradient)
    assert (np.abs(found) > 1e-3).sum() >= 2
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("follow", ["scale_by_learning_rate", "scale_by_schedule"])
def test_scale_by_mada_with_its_learning_rate_is_mada(follow):
    schedule = optax.linear_schedule(0.1, 0.01, 5)
    last = {
        "scale_by_learning_rate": optax.scale_by_learning_rate(schedule),
        "scale_by_schedule": optax.scale_by_schedule(lambda count: -schedule(count)),
    }[follow]
    options = dict(init=INTERIOR, **LEARN)
    chained = run(optax.chain(scale_by_mada(schedule, **options), last))
    whole = run(mada(schedule, **options))
    assert_equal(chained[0], whole[0])
    assert_equal(hyperparams(chained[1]), hyperparams(whole[1]))


def test_hyper_gradient_uses_the_learning_rate_of_the_step_before():
    """The classic off-by-one: the slope found at update t + 1 is proportional to rate t."""
    rates = jnp.asarray([1.0, 7.0, 3.0, 11.0, 2.0, 5.0])
    options = dict(hyper_learning_rate=0.0, hyper_grad_clip=None, **LEARN)

    def used(rate):
        optimizer = scale_by_mada(rate, INTERIOR, **options)
        states = jax.jit(lambda g: replay(optimizer, g)[2])(GRADS)
        return stacked(states.hyper_gradient), states.learning_rate

    scheduled, seen = used(lambda count: rates[count])
    constant, _ = used(1.0)
    assert_equal(seen, rates)
    np.testing.assert_allclose(scheduled[1:], rates[:-1, None] * constant[1:], rtol=1e-5)
