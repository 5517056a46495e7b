"""Tests of the train state and the step builders."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icmljax.training.state import (
    Precision,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
)


def init_params(key, dtype=jnp.float32):
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (3, 5), dtype) / 2,
        "b1": jnp.zeros(5, dtype),
        "w2": jax.random.normal(second, (5, 1), dtype) / 2,
    }


def make_batch(rows=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": x[:, :1] - x[:, 1:2], "id": np.arange(rows, dtype=np.int32)}


def loss_fn(params, batch, key):
    del key
    prediction = jnp.tanh(batch["x"] @ params["w1"] + params["b1"]) @ params["w2"]
    return jnp.mean((prediction - batch["y"]) ** 2), {"mean": jnp.mean(prediction)}


def noisy_loss_fn(params, batch, key):
    loss, aux = loss_fn(params, batch, key)
    noise = jax.random.normal(key, params["b1"].shape)
    return loss + params["b1"] @ noise, aux | {"noise": noise[0]}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def start(seed=0):
    return init_state(init_params(jax.random.key(seed)), optimizer(), jax.random.key(seed + 100))


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6):
    def compare(left, right):
        assert left.dtype == right.dtype
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)

    jax.tree.map(compare, actual, expected)


def test_step_is_one_update_of_the_optimizer_with_the_gradient_of_the_loss():
    state, batch = start(), make_batch()
    new, metrics = jax.jit(make_train_step(loss_fn, optimizer()))(state, batch)

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, state.key)
    updates, opt_state = optimizer().update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    assert_trees_close(new, TrainState(jnp.int32(1), params, opt_state, state.key))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    assert_trees_close(metrics, {"loss": loss, "grad_norm": jnp.float32(norm), "mean": aux["mean"]})


def test_key_of_a_step_is_folded_with_the_step_number():
    step = jax.jit(make_train_step(noisy_loss_fn, optimizer()))
    state, batch = start(), make_batch()
    for number in range(3):
        key = jax.random.fold_in(state.key, number)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["noise"], jax.random.normal(key, (5,))[0], rtol=1e-6)
        assert state.step == number + 1


@pytest.mark.parametrize("num", [2, 3, 12])
def test_accumulated_gradient_is_that_of_the_whole_batch(num):
    sgd, batch = optax.sgd(1.0), make_batch(12)
    state = init_state(init_params(jax.random.key(0)), sgd, jax.random.key(1))
    whole = jax.jit(make_train_step(loss_fn, sgd))(state, batch)
    parts = jax.jit(make_train_step(loss_fn, sgd, grad_accumulation=num))(state, batch)
    assert_trees_close(parts, whole)


def test_micro_batches_are_strided_and_have_keys_of_their_own():
    def spy(params, batch, key):
        first = jnp.zeros(12).at[batch["id"]].set(1.0 + batch["id"][0])
        return jnp.sum(params["b1"] ** 2), {"first": first, "noise": jax.random.normal(key)}

    state = start()
    _, metrics = make_train_step(spy, optimizer(), grad_accumulation=3)(state, make_batch(12))
    expected = (1.0 + np.arange(12) % 3) / 3  # row r lies in micro-batch r % 3, led by row r % 3
    np.testing.assert_allclose(metrics["first"], expected, rtol=1e-6)
    keys = jax.random.split(jax.random.fold_in(state.key, 0), 3)
    noise = np.mean(jax.vmap(jax.random.normal)(keys))
    np.testing.assert_allclose(metrics["noise"], noise, rtol=1e-5)


def test_gradients_of_micro_batches_are_added_in_float32():
    # 1 + 255 * 2^-8 in bf16 additions stays 1: every summand is lost.
    def linear(params, batch, key):
        del key
        return jnp.sum(params["w"] * jnp.mean(batch["x"])), {}

    x = np.full((256, 1), 2.0**-9, np.float32)
    x[0] = 1.0
    sgd = optax.sgd(1.0)
    precision = Precision.from_string("bf16_params")
    state = init_state({"w": jnp.zeros(1)}, sgd, jax.random.key(0), precision=precision)
    step = make_train_step(linear, sgd, grad_accumulation=256, precision=precision)
    new, metrics = jax.jit(step)(state, {"x": x})
    expected = x.mean()
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)
    np.testing.assert_allclose(-np.float32(new.params["w"][0]), expected, rtol=2**-8)


@pytest.mark.parametrize("grad_accumulation", [1, 2])
@pytest.mark.parametrize("name", ["f32", "bf16", "bf16_params"])
def test_precision_policy(name, grad_accumulation):
    precision = Precision.from_string(name)
    compute = jnp.dtype(jnp.float32 if name == "f32" else jnp.bfloat16)
    kept = jnp.dtype(jnp.bfloat16 if name == "bf16_params" else jnp.float32)
    seen = []

    def spy(params, batch, key):
        seen.append((params["w1"].dtype, batch["x"].dtype, batch["id"].dtype))
        return loss_fn(params, batch, key)

    def keep_gradient(updates, state, params=None):
        del state, params
        return updates, updates

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), keep_gradient)
    state = init_state(init_params(jax.random.key(0)), tx, jax.random.key(1), precision=precision)
    step = make_train_step(spy, tx, precision=precision, grad_accumulation=grad_accumulation)
    new, metrics = jax.jit(step)(state, make_batch())
    assert set(seen) == {(compute, compute, jnp.dtype(jnp.int32))}
    for tree in (state.params, new.params, new.opt_state):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {kept}
    assert {value.dtype for value in metrics.values()} == {jnp.dtype(jnp.float32)}
    exact = jax.grad(loss_fn, has_aux=True)(init_params(jax.random.key(0)), make_batch(), None)[0]
    tolerance = 1e-5 if name == "f32" else 0.05
    for actual, expected in zip(
        jax.tree.leaves(new.opt_state), jax.tree.leaves(exact), strict=True
    ):
        np.testing.assert_allclose(
            np.float32(actual), expected, atol=tolerance * np.abs(expected).max()
        )


def test_jit_equals_eager_and_scan_equals_loop():
    step = make_train_step(
        noisy_loss_fn,
        optimizer(),
        grad_accumulation=2,
        state_metrics=lambda state: {"norm": optax.tree.norm(state.params)},
    )
    jitted = jax.jit(step)
    batches = [make_batch(4, seed) for seed in range(3)]
    state, logged = start(), []
    for batch in batches:
        state, metrics = jitted(state, batch)
        logged.append(metrics)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(start(), stacked)
    assert_trees_close(scanned, state)
    assert_trees_close(metrics, jax.tree.map(lambda *rows: jnp.stack(rows), *logged))

    assert_trees_close(step(start(), batches[0]), jitted(start(), batches[0]))


def test_vmap_over_a_population_equals_a_loop():
    step = jax.jit(make_train_step(noisy_loss_fn, optimizer(), grad_accumulation=2))
    states = [start(seed) for seed in range(3)]
    population = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    batch = make_batch()
    together, metrics = jax.vmap(step, in_axes=(0, None))(population, batch)
    for member, state in enumerate(states):
        alone = step(state, batch)
        assert_trees_close(jax.tree.map(lambda leaf: leaf[member], (together, metrics)), alone)  # noqa: B023


@pytest.mark.parametrize(
    "tx", [optax.adam(optax.cosine_decay_schedule(1e-2, 10)), optax.lion(1e-3)]
)
@pytest.mark.parametrize("name", ["f32", "bf16_params"])
def test_step_keeps_structure_shapes_dtypes_and_weak_types(tx, name):
    precision = Precision.from_string(name)
    state = init_state(init_params(jax.random.key(0)), tx, jax.random.key(1), precision=precision)
    step = make_train_step(loss_fn, tx, precision=precision)
    new, _ = jax.eval_shape(step, state, make_batch())

    def signature(leaf):
        return leaf.shape, leaf.dtype, leaf.weak_type

    assert jax.tree.map(signature, jax.eval_shape(lambda s: s, state)) == jax.tree.map(
        signature, new
    )


def test_state_metrics_see_the_new_state():
    step = make_train_step(
        loss_fn, optimizer(), state_metrics=lambda state: {"step_seen": state.step}
    )
    _, metrics = step(start(), make_batch())
    assert metrics["step_seen"] == 1 and metrics["step_seen"].dtype == jnp.float32


def test_training_lowers_the_loss_that_the_eval_step_reports():
    evaluate = jax.jit(make_eval_step(loss_fn))
    step = jax.jit(make_train_step(loss_fn, optimizer()))
    state, batch = start(), make_batch(64)
    before = evaluate(state.params, batch, state.key)
    np.testing.assert_allclose(before["loss"], loss_fn(state.params, batch, None)[0], rtol=1e-5)
    assert set(before) == {"loss", "mean"}
    for _ in range(200):
        state, _ = step(state, batch)
    assert evaluate(state.params, batch, state.key)["loss"] < before["loss"] / 4


def test_eval_step_computes_in_the_compute_dtype_and_reports_float32():
    seen = []

    def spy(params, batch, key):
        seen.append((params["w1"].dtype, batch["x"].dtype))
        return loss_fn(params, batch, key)

    state = start()
    evaluate = make_eval_step(spy, precision=Precision.from_string("bf16"))
    metrics = evaluate(state.params, make_batch(), state.key)
    assert seen == [(jnp.dtype(jnp.bfloat16),) * 2]
    assert {value.dtype for value in metrics.values()} == {jnp.dtype(jnp.float32)}


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_any_divisor_gives_the_same_gradient_norm(num, rows_each, seed):
    def metrics(grad_accumulation):
        step = make_train_step(loss_fn, optimizer(), grad_accumulation=grad_accumulation)
        return jax.jit(step)(start(), make_batch(num * rows_each, seed))[1]

    assert_trees_close(metrics(num), metrics(1), rtol=1e-4)


@pytest.mark.bad_input
def test_bad_input_is_explained():
    state, batch = start(), make_batch(10)
    with pytest.raises(ValueError, match="10 rows cannot be split into 4 micro-batches"):
        make_train_step(loss_fn, optimizer(), grad_accumulation=4)(state, batch)
    with pytest.raises(ValueError, match="grad_accumulation is 0"):
        make_train_step(loss_fn, optimizer(), grad_accumulation=0)
    with pytest.raises(ValueError, match="unknown precision 'f16'; expected one of f32, bf16"):
        Precision.from_string("f16")
    with pytest.raises(TypeError, match=r"dtype uint32; expected a typed key from jax.random.key"):
        init_state(state.params, optimizer(), jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"loss of shape \(5,\); expected a scalar"):
        make_train_step(lambda p, b, k: (p["b1"], {}), optimizer())(state, batch)
    for name in ("loss", "grad_norm"):
        step = make_train_step(lambda p, b, k: (jnp.sum(p["b1"]), {name: 0.0}), optimizer())  # noqa: B023
        with pytest.raises(ValueError, match=rf"loss_fn returns metrics named \['{name}'\]"):
            step(state, batch)
    step = make_train_step(loss_fn, optimizer(), state_metrics=lambda _: {"mean": 0.0})
    with pytest.raises(ValueError, match=r"state_metrics returns metrics named \['mean'\]"):
        step(state, batch)
