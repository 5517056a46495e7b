"""Tests of icmljax.language.training."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.data.text import pack
from icmljax.language import llama
from icmljax.language.linear import LowRank
from icmljax.language.llama import LlamaConfig
from icmljax.language.training import (
    attach_lora,
    distillation_loss,
    init_lora,
    llama_decay_mask,
    load_balancing_loss,
    make_distillation_loss,
    make_loss,
    merge_lora,
)
from icmljax.nn.cross_entropy import token_losses
from icmljax.training import mesh as mesh_lib
from icmljax.training import state as state_lib

CONFIG = LlamaConfig(
    vocab_size=48,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    max_length=32,
)
EXPERTS = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2, d_ff=32)
KEY = jax.random.key(0)
ALL_MATRICES = r"layers/(query|key|value|output|gate|up|down)$"

_forward = jax.jit(llama.forward, static_argnums=1)


@functools.partial(jax.jit, static_argnums=0)
def _shaken(config=CONFIG, seed=0):
    """Parameters large enough for every term to matter, norms included."""
    params = llama.init(jax.random.key(seed), config)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noise = [0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, [x + e for x, e in zip(leaves, noise, strict=True)])


def _documents(lengths=(5, 3, 9, 1, 12, 17), seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, CONFIG.vocab_size, length) for length in lengths]


def _batch(length=12, **kwargs):
    return jax.tree.map(jnp.asarray, pack(_documents(), length, **kwargs))


def _loss_and_grad(loss_fn):
    return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


def _assert_trees_close(actual, expected, rtol=1e-4):
    """Every leaf agrees, measured by the size of the leaf: small entries are sums of large ones."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-12)
        assert error < rtol, f"{jax.tree_util.keystr(path)}: {error}"


# The loss of next tokens


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("eos_id", [None, 0])
def test_packed_rows_are_their_documents(config, eos_id):
    params, batch = _shaken(config), _batch(20, eos_id=eos_id)
    assert batch["segments"].max() >= 3  # several documents share a row
    logits = _forward(
        params,
        config,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segments"],
    )
    total, correct, count = 0.0, 0, 0
    for document in _documents():
        targets = document[1:] if eos_id is None else np.append(document[1:], eos_id)
        padded = np.zeros((1, 20), np.int32)  # of one shape, so that it compiles once
        padded[0, : len(document)] = document
        alone = _forward(params, config, jnp.asarray(padded))[:, : len(document)]
        row, start = next(
            (row, start)
            for row in range(len(batch["tokens"]))
            for start in range(20 - len(document) + 1)
            if np.array_equal(batch["tokens"][row, start : start + len(document)], document)
            and batch["positions"][row, start] == 0
        )
        packed = logits[row, start : start + len(document)]
        np.testing.assert_allclose(packed, alone[0], rtol=1e-4, atol=1e-5)
        used = alone[:, : len(targets)]
        total += float(token_losses(used, jnp.asarray(targets)[None]).sum())
        correct += int((used.argmax(-1) == targets).sum())
        count += len(targets)
    loss, aux = jax.jit(make_loss(config))(params, batch, KEY)
    np.testing.assert_allclose(loss, total / count, rtol=1e-5)
    assert loss.dtype == jnp.float32
    assert aux["tokens"] == count
    np.testing.assert_allclose(aux["accuracy"], correct / count, rtol=1e-6)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_padding_changes_nothing(config):
    params, batch = _shaken(config), _batch(17, eos_id=0)
    padding = ((0, 2), (0, 4))  # two rows of nothing, and four columns
    more = {name: jnp.pad(array, padding) for name, array in batch.items()}
    for name in ("tokens", "targets"):
        more[name] = jnp.where(more["segments"] > 0, more[name], 7)
    value_and_grad = _loss_and_grad(make_loss(config, router_weight=float(config.num_experts > 0)))
    (loss, aux), gradient = value_and_grad(params, batch, KEY)
    (padded_loss, padded_aux), padded_gradient = value_and_grad(params, more, KEY)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
    _assert_trees_close(padded_aux, aux, 1e-5)
    _assert_trees_close(padded_gradient, gradient)


def test_optional_arrays_of_a_batch():
    params, loss_fn = _shaken(), jax.jit(make_loss(CONFIG))
    tokens = jax.random.randint(KEY, (3, 9), 0, 48)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss, aux = loss_fn(params, batch, KEY)
    assert aux["tokens"] == 24
    losses = token_losses(_forward(params, CONFIG, batch["tokens"]), batch["targets"])
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
    full = batch | {
        "positions": jnp.broadcast_to(jnp.arange(8), (3, 8)),
        "segments": jnp.ones((3, 8), jnp.int32),
        "weights": jnp.ones((3, 8)),
    }
    np.testing.assert_allclose(loss_fn(params, full, KEY)[0], loss, rtol=1e-5)
    weights = jnp.zeros((3, 8)).at[1, 2].set(2.0).at[2, 7].set(0.5)
    loss, aux = loss_fn(params, batch | {"weights": weights}, KEY)
    np.testing.assert_allclose(loss, 0.8 * losses[1, 2] + 0.2 * losses[2, 7], rtol=1e-5)
    assert aux["tokens"] == 2
    nothing = batch | {"weights": jnp.zeros((3, 8))}
    (loss, aux), gradient = _loss_and_grad(make_loss(CONFIG))(params, nothing, KEY)
    assert loss == aux["accuracy"] == aux["tokens"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_variants_that_compute_the_same(config):
    params, batch = _shaken(config), _batch(12)
    weight = 0.1 * (config.num_experts > 0)
    (loss, aux), gradient = _loss_and_grad(make_loss(config, router_weight=weight))(
        params, batch, KEY
    )
    remat = dataclasses.replace(config, remat=True)
    for variant in (
        make_loss(config, chunk=4, router_weight=weight),
        make_loss(remat, router_weight=weight),
    ):
        (other_loss, other_aux), other_gradient = _loss_and_grad(variant)(params, batch, KEY)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        _assert_trees_close(other_aux, aux, 1e-5)
        _assert_trees_close(other_gradient, gradient)


def test_chunks_of_a_quantized_model():
    params, batch = llama.quantize_params(_shaken(), 8), _batch()
    whole, chunked = (make_loss(CONFIG, chunk=chunk) for chunk in (None, 3))
    np.testing.assert_allclose(
        jax.jit(chunked)(params, batch, KEY)[0], jax.jit(whole)(params, batch, KEY)[0], rtol=1e-5
    )


def test_bfloat16_multiplies_low_and_sums_high():
    params, batch = llama.init(KEY, CONFIG), _batch()
    loss, _ = make_loss(CONFIG, dtype=jnp.bfloat16)(params, batch, KEY)
    expected, _ = make_loss(CONFIG)(params, batch, KEY)
    assert loss.dtype == jnp.float32
    assert loss != expected
    np.testing.assert_allclose(loss, expected, rtol=5e-3)


def test_gradient_is_that_of_finite_differences():
    """With float64 weights; scores and logits are float32, which bounds the agreement."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), _shaken())
        batch = _batch()
        loss = jax.jit(lambda params: make_loss(CONFIG, dtype=jnp.float64)(params, batch, KEY)[0])
        gradient = jax.jit(jax.grad(loss))(params)
        random = np.random.default_rng(0)
        leaves, treedef = jax.tree.flatten(params)
        for index, (path, slope) in enumerate(jax.tree_util.tree_leaves_with_path(gradient)):
            # Along the gradient and a random direction of its size, so that the slope is not small.
            noise = random.standard_normal(slope.shape)
            unit = slope / jnp.linalg.norm(slope)
            direction = unit + 0.5 * noise / np.linalg.norm(noise)

            def at(step, index=index, direction=direction):
                moved = [*leaves[:index], leaves[index] + step * direction, *leaves[index + 1 :]]
                return float(loss(jax.tree.unflatten(treedef, moved)))

            step = 0.02  # of fourth order
            difference = 8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))
            expected = float(jnp.vdot(slope, direction))
            np.testing.assert_allclose(
                difference / (12 * step), expected, rtol=1e-3, err_msg=jax.tree_util.keystr(path)
            )


def _counting_batch(rows=8, length=16):
    """Rows that count upwards modulo 16 from anywhere: the next token follows from this one."""
    starts = np.arange(rows)[:, None] * 2
    tokens = (starts + np.arange(length + 1)) % 16
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_trains(config):
    optimizer = optax.adamw(1e-2, weight_decay=0.01, mask=llama_decay_mask)
    loss_fn = make_loss(config, router_weight=0.01 * (config.num_experts > 0))
    step = jax.jit(state_lib.make_train_step(loss_fn, optimizer))
    state, batch = state_lib.init_state(llama.init(KEY, config), optimizer, KEY), _counting_batch()
    for _ in range(40):
        state, metrics = step(state, batch)
    assert metrics["loss"] < 0.1
    assert metrics["accuracy"] == 1
    assert metrics["tokens"] == 8 * 16


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_mesh_is_single_device(config):
    optimizer, batch = optax.adam(1e-2), _counting_batch()
    weight = 0.01 * (config.num_experts > 0)

    def init(key):
        return state_lib.init_state(_shaken(config), optimizer, key)

    single = jax.jit(state_lib.make_train_step(make_loss(config, router_weight=weight), optimizer))
    expected_state, expected = init(KEY), []
    for _ in range(3):
        expected_state, metrics = single(expected_state, batch)
        expected.append(metrics["loss"])

    mesh = mesh_lib.make_mesh("data=4,model=2")
    rules = llama.sharding_rules(config, mesh)
    state, shardings = mesh_lib.init_sharded(init, KEY, optimizer, rules, mesh)
    loss_fn = make_loss(
        config, chunk=8, router_weight=weight, activation_sharding=NamedSharding(mesh, P("data"))
    )
    step = mesh_lib.jit_step(state_lib.make_train_step(loss_fn, optimizer), mesh, shardings)
    losses = []
    for _ in range(3):
        state, metrics = step(state, mesh_lib.put_batch(batch, mesh))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gate = state.params["layers"]["gate"]
    assert gate.addressable_shards[0].data.size == gate.size // 8


# Experts


def test_load_balancing_loss_is_its_definition():
    router = jax.nn.log_softmax(2 * jax.random.normal(KEY, (3, 2, 5, 4)))
    weights = jnp.array([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]], jnp.float32)
    probabilities = np.exp(np.asarray(router, np.float64))
    each = []
    for layer in probabilities:
        counts, total, real = np.zeros(4), np.zeros(4), 0
        for b, t in zip(*np.nonzero(np.asarray(weights)), strict=True):
            counts[np.argsort(-layer[b, t])[:2]] += 1
            total += layer[b, t]
            real += 1
        each.append(4 * np.sum(counts / (2 * real) * total / real))
    actual = load_balancing_loss(router, 2, weights)
    np.testing.assert_allclose(actual, np.mean(each), rtol=1e-5)
    np.testing.assert_allclose(load_balancing_loss(router, 2, weights > 0), actual, rtol=1e-6)


def test_load_balancing_loss_at_its_extremes():
    even = jnp.log(jnp.eye(4)[None, None] * 0.96 + 0.01)  # each expert gets one of four tokens
    np.testing.assert_allclose(load_balancing_loss(even, 1), 1, rtol=1e-5)
    one = jnp.broadcast_to(even[:, :, :1], even.shape)
    np.testing.assert_allclose(load_balancing_loss(one, 1), 4 * 0.97, rtol=1e-5)


def test_router_loss_balances():
    """Its gradient alone spreads the tokens of a router that prefers one expert."""
    params, batch = _shaken(EXPERTS), _batch()
    loss_fn = make_loss(EXPERTS, router_weight=1000.0)
    value_and_grad = _loss_and_grad(loss_fn)
    (loss, before), gradient = value_and_grad(params, batch, KEY)
    plain, without = jax.jit(make_loss(EXPERTS))(params, batch, KEY)
    assert before["router_loss"] == without["router_loss"]  # reported even where it has no weight
    np.testing.assert_allclose(loss, plain + 1000 * before["router_loss"], rtol=1e-5)
    router = params["layers"]["router"] - 2e-3 * gradient["layers"]["router"]
    params = params | {"layers": params["layers"] | {"router": router}}
    after = value_and_grad(params, batch, KEY)[0][1]["router_loss"]
    assert 1 <= after < before["router_loss"] - 0.01


# Distillation


def _logits(seed, shape=(2, 5, 11)):
    return 3 * jax.random.normal(jax.random.key(seed), shape)


def _divergence(student, teacher, temperature):
    """KL(teacher || student) of each token in float64, T^2 included."""

    def log_softmax(x):
        x = np.asarray(x, np.float64) / temperature
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(teacher), log_softmax(student)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isinf(p), 0, np.exp(p) * (p - q))
    return temperature**2 * terms.sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_distillation_loss_is_the_divergence(temperature):
    student, teacher = _logits(0), _logits(1).at[:, :, 3].set(-jnp.inf)
    expected = _divergence(student, teacher, temperature)
    loss = functools.partial(distillation_loss, temperature=temperature)
    np.testing.assert_allclose(loss(student, teacher), expected.mean(), rtol=1e-5)
    weights = jnp.array([[1, 0, 0, 2, 0], [0.5, 0, 0, 0, 0]])
    weighted = loss(student, teacher, weights=weights)
    np.testing.assert_allclose(weighted, np.average(expected, weights=weights), rtol=1e-5)
    assert loss(student, teacher, weights=jnp.zeros((2, 5))) == 0
    gradient, teacher_gradient = jax.grad(loss, argnums=(0, 1))(student, teacher)
    q = np.asarray(jax.nn.softmax(student / temperature))
    p = np.asarray(jax.nn.softmax(teacher / temperature))
    np.testing.assert_allclose(gradient, temperature * (q - p) / 10, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(teacher_gradient, 0)
    low = loss(student.astype(jnp.bfloat16), teacher.astype(jnp.bfloat16))
    assert low.dtype == jnp.float32


def test_distillation_loss_is_zero_at_equality():
    teacher = _logits(1).at[:, :, 3].set(-jnp.inf).at[0, 0, 4:].set(-jnp.inf)
    loss, gradient = jax.value_and_grad(distillation_loss)(teacher, teacher)
    assert abs(loss) < 1e-6
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    assert distillation_loss(_logits(0), teacher) > 0.1
    # What the student excludes and the teacher does not is infinitely bad.
    assert distillation_loss(teacher, _logits(1)) == np.inf


def test_student_learns_its_teacher():
    teacher, batch = _shaken(seed=5), _batch(eos_id=0)
    batch["teacher_logits"] = _forward(
        teacher,
        CONFIG,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segments"],
    )
    del batch["targets"]
    loss_fn = make_distillation_loss(CONFIG, temperature=2.0)
    assert jax.jit(loss_fn)(teacher, batch, KEY)[0] < 1e-6
    optimizer = optax.adam(1e-2)
    step = jax.jit(state_lib.make_train_step(loss_fn, optimizer))
    state = state_lib.init_state(llama.init(KEY, CONFIG), optimizer, KEY)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    student = llama.init(KEY, CONFIG)
    logits = _forward(
        student,
        CONFIG,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segments"],
    )
    expected = _divergence(logits, batch["teacher_logits"], 2.0)
    np.testing.assert_allclose(losses[0], np.average(expected, weights=batch["weights"]), rtol=1e-5)
    assert losses[-1] < losses[0] / 2


# LoRA


def _filled(adapters, seed=3):
    """Adapters whose `up` is not zero, as after some training."""
    return {
        path: adapter
        | {"up": 0.1 * jax.random.normal(jax.random.key(seed + i), adapter["up"].shape)}
        for i, (path, adapter) in enumerate(adapters.items())
    }


def test_init_lora():
    config = dataclasses.replace(CONFIG, num_layers=3, num_kv_heads=1)
    params = llama.abstract_params(config)
    adapters = init_lora(KEY, params, 5)
    shapes = {path: (a["down"].shape, a["up"].shape) for path, a in adapters.items()}
    assert shapes == {
        "layers/query": ((3, 32, 5), (3, 5, 32)),
        "layers/key": ((3, 32, 5), (3, 5, 8)),
        "layers/value": ((3, 32, 5), (3, 5, 8)),
        "layers/output": ((3, 32, 5), (3, 5, 32)),
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype(jnp.float32)}
    for adapter in adapters.values():
        assert not adapter["up"].any()
        bound = 32**-0.5
        assert 0.9 * bound < np.abs(adapter["down"]).max() <= bound
        assert abs(adapter["down"].std() - bound / 3**0.5) < 0.1 * bound
    assert len({float(adapter["down"].ravel()[0]) for adapter in adapters.values()}) == 4
    # Other targets, whose inputs are as wide as the MLP; a choice of targets changes no draw.
    more = init_lora(KEY, params, 5, targets=r"layers/(down|query)$")
    assert more["layers/down"]["down"].shape == (3, 64, 5)
    np.testing.assert_array_equal(more["layers/query"]["down"], adapters["layers/query"]["down"])
    assert np.abs(init_lora(jax.random.key(1), params, 5)["layers/key"]["down"]).max() > 0
    quantized = jax.eval_shape(lambda params: llama.quantize_params(params, 4), params)
    assert jax.tree.map(jnp.shape, init_lora(KEY, quantized, 5)) == jax.tree.map(
        jnp.shape, adapters
    )


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_attached_and_merged_are_the_same(bits):
    params, tokens = _shaken(), _batch()["tokens"]
    if bits is not None:
        params = llama.quantize_params(params, bits)
    adapters = init_lora(KEY, params, 3, targets=ALL_MATRICES)
    base = _forward(params, CONFIG, tokens)
    np.testing.assert_allclose(
        _forward(attach_lora(params, adapters), CONFIG, tokens), base, rtol=0, atol=1e-6
    )
    adapters = _filled(adapters)
    attached = attach_lora(params, adapters, alpha=6.0)
    assert isinstance(attached["layers"]["gate"], LowRank)
    assert attached["layers"]["gate"].scale == 2
    logits = _forward(attached, CONFIG, tokens)
    merged = jax.jit(lambda *args: merge_lora(*args, alpha=6.0))(params, adapters)
    assert jax.tree.map(jnp.shape, merged["layers"]) == llama.parameter_shapes(CONFIG)["layers"]
    np.testing.assert_allclose(_forward(merged, CONFIG, tokens), logits, rtol=1e-4, atol=1e-5)
    assert np.abs(logits - base).max() > 0.1
    # alpha doubles the update; without it the factor is 1.
    single, double = (merge_lora(params, adapters, alpha=alpha) for alpha in (None, 6.0))
    dense = merge_lora(params, jax.tree.map(jnp.zeros_like, adapters))
    for name in ("query", "output", "down"):
        once = single["layers"][name] - dense["layers"][name]
        twice = double["layers"][name] - dense["layers"][name]
        np.testing.assert_allclose(twice, 2 * once, rtol=1e-3, atol=1e-6)
    # Layers taken apart, afterwards.
    apart = _forward(llama.unstack_layers(attached), CONFIG, tokens)
    np.testing.assert_allclose(apart, logits, rtol=1e-4, atol=1e-5)


def test_update_is_the_product_of_its_factors():
    params = _shaken()
    adapters = _filled(init_lora(KEY, params, 3))
    merged = merge_lora(params, adapters, alpha=1.5)["layers"]
    down, up = (np.asarray(adapters["layers/output"][name], np.float64) for name in ("down", "up"))
    for layer in range(2):
        update = 0.5 * (down[layer] @ up[layer]).reshape(4, 8, 32)
        expected = params["layers"]["output"][layer] + update
        np.testing.assert_allclose(merged["output"][layer], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged["gate"], params["layers"]["gate"])
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert merge_lora(half, adapters)["layers"]["query"].dtype == jnp.bfloat16


@pytest.mark.parametrize("bits", [None, 4])
def test_lora_trains_its_adapters_alone(bits):
    params, batch = llama.init(KEY, CONFIG), _counting_batch()
    # Norms of 3: an untrained model with the usual weights hardly listens to its layers.
    params = params | {"embedding": 10 * params["embedding"], "head": 10 * params["head"]}
    if bits is not None:
        params = llama.quantize_params(params, bits)
    loss_fn = make_loss(dataclasses.replace(CONFIG, remat=True))

    def lora_loss(adapters, batch, key):
        return loss_fn(attach_lora(params, adapters, alpha=16.0), batch, key)

    adapters = init_lora(KEY, params, 4, targets=ALL_MATRICES)
    (start, _), gradient = _loss_and_grad(lora_loss)(adapters, batch, KEY)
    assert jax.tree.structure(gradient) == jax.tree.structure(adapters)
    for path, adapter in gradient.items():
        assert np.abs(adapter["up"]).max() > 1e-8, path
        np.testing.assert_array_equal(adapter["down"], 0, err_msg=path)
    optimizer = optax.adam(3e-3)
    step = jax.jit(state_lib.make_train_step(lora_loss, optimizer))
    state = state_lib.init_state(adapters, optimizer, KEY)
    for _ in range(30):
        state, metrics = step(state, batch)
    assert metrics["loss"] < 0.5 * start
    assert all(adapter["down"].any() for adapter in gradient.values()) is False
    merged = jax.jit(loss_fn)(merge_lora(params, state.params, alpha=16.0), batch, KEY)[0]
    attached = jax.jit(lora_loss)(state.params, batch, KEY)[0]
    np.testing.assert_allclose(merged, attached, rtol=1e-4)


def test_adapters_of_attention_in_a_model_with_experts():
    params, tokens = _shaken(EXPERTS), _batch()["tokens"]
    adapters = _filled(init_lora(KEY, params, 2, targets="layers/(query|router)$"))
    attached = _forward(attach_lora(params, adapters), EXPERTS, tokens)
    merged = _forward(merge_lora(params, adapters), EXPERTS, tokens)
    np.testing.assert_allclose(attached, merged, rtol=1e-4, atol=1e-4)
    assert np.abs(attached - _forward(params, EXPERTS, tokens)).max() > 0.01


def test_adapters_of_layers_taken_apart():
    params, tokens = _shaken(), _batch()["tokens"]
    apart = llama.unstack_layers(params)
    adapters = _filled(init_lora(KEY, apart, 2, targets=r"layers/1/(key|down)$"))
    assert adapters.keys() == {"layers/1/key", "layers/1/down"}
    attached = _forward(attach_lora(apart, adapters), CONFIG, tokens)
    merged = _forward(merge_lora(apart, adapters), CONFIG, tokens)
    np.testing.assert_allclose(attached, merged, rtol=1e-4, atol=1e-5)
    assert np.abs(attached - _forward(params, CONFIG, tokens)).max() > 0.01


def test_decay_mask_keeps_norms():
    for config in (CONFIG, EXPERTS, dataclasses.replace(CONFIG, tie_embeddings=True)):
        params = llama.abstract_params(config)
        mask = llama_decay_mask(params)
        assert jax.tree.structure(mask) == jax.tree.structure(params)
        kept = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, decays in jax.tree_util.tree_leaves_with_path(mask)
            if not decays
        ]
        assert kept == ["final_norm", "layers/attention_norm", "layers/mlp_norm"]
        apart = llama_decay_mask(llama.unstack_layers(_shaken(config)))
        assert sum(not decays for decays in jax.tree.leaves(apart)) == 1 + 2 * 2
    adapters = init_lora(KEY, llama.abstract_params(CONFIG), 2)
    assert all(jax.tree.leaves(llama_decay_mask(adapters)))


# Bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("config", "weight"), [(CONFIG, 0.1), (EXPERTS, -0.1)], ids=["dense", "negative"]
)
def test_bad_router_weight(config, weight):
    with pytest.raises(ValueError, match=f"router_weight={weight} with num_experts="):
        make_loss(config, router_weight=weight)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": None}, r"lacks \['targets'\]; icmljax.data.text.pack makes batches"),
        ({"tokens": None}, r"lacks \['tokens'\]"),
        ({"weights": jnp.ones(16)}, r"'weights' of the batch has shape \(16,\); .* \(8, 16\)"),
        ({"targets": jnp.ones((8, 15), int)}, r"'targets' of the batch has shape \(8, 15\)"),
        ({"segments": jnp.ones((1, 16), int)}, r"'segments' of the batch has shape \(1, 16\)"),
        ({"positions": jnp.ones((8, 1), int)}, r"'positions' of the batch has shape \(8, 1\)"),
        ({"tokens": jnp.ones((8, 16))}, "tokens are float32; expected integers"),
    ],
)
def test_bad_batch(change, message):
    batch = {name: x for name, x in (_counting_batch() | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        make_loss(CONFIG)(llama.abstract_params(CONFIG), batch, KEY)


@pytest.mark.bad_input
def test_bad_chunk():
    with pytest.raises(ValueError, match="chunk=5 does not divide the sequence of 16 tokens"):
        make_loss(CONFIG, chunk=5)(llama.init(KEY, CONFIG), _counting_batch(), KEY)


@pytest.mark.bad_input
def test_bad_distillation():
    with pytest.raises(ValueError, match=r"student logits have shape \(2, 5, 11\), teacher.*12"):
        distillation_loss(_logits(0), _logits(0, (2, 5, 12)))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be above 0, got {temperature}"):
            distillation_loss(_logits(0), _logits(1), temperature=temperature)
        with pytest.raises(ValueError, match=f"temperature must be above 0, got {temperature}"):
            make_distillation_loss(CONFIG, temperature=temperature)
    with pytest.raises(ValueError, match=r"lacks \['teacher_logits'\]"):
        make_distillation_loss(CONFIG)(llama.init(KEY, CONFIG), _counting_batch(), KEY)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("config", "rank", "targets", "message"),
    [
        (CONFIG, 0, "query", "rank=0; expected 1 or more"),
        (CONFIG, 2, "layers/q_proj", "finds none of the parameters; they are embedding, final_no"),
        (CONFIG, 2, "norm", "'final_norm' cannot have an adapter: expected one of the matrices"),
        (CONFIG, 2, "layers/mlp_norm", "'layers/mlp_norm' cannot have an adapter"),
        (CONFIG, 2, "embedding", "'embedding' cannot have an adapter"),
        (EXPERTS, 2, "gate", "'layers/gate' holds the matrices of experts"),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_bad_init_lora(config, rank, targets, message, quantized):
    params = llama.abstract_params(config)
    if quantized:
        params = jax.eval_shape(lambda params: llama.quantize_params(params, 8), params)
    with pytest.raises(ValueError, match=re.escape(message)):
        init_lora(KEY, params, rank, targets=targets)


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [attach_lora, merge_lora])
def test_adapters_that_do_not_fit(function):
    params = llama.init(KEY, CONFIG)
    adapters = init_lora(KEY, params, 2)
    with pytest.raises(ValueError, match="adapters for nothing, but the parameters are embedding"):
        function(params, {})
    with pytest.raises(ValueError, match=r"adapters for \['layers/0/query'\], but the parameters"):
        function(params, {"layers/0/query": adapters["layers/query"]})
    other = dataclasses.replace(CONFIG, num_kv_heads=4)
    with pytest.raises(ValueError, match=r"'layers/key' has down \(2, 32, 2\) and up \(2, 2, 32\)"):
        function(params, init_lora(KEY, llama.init(KEY, other), 2))
    deeper = dataclasses.replace(CONFIG, num_layers=3)
    with pytest.raises(ValueError, match=r"expected \(2, 32, 'rank'\) and"):
        function(params, init_lora(KEY, llama.init(KEY, deeper), 2))
    mixed = {name: leaf[..., :1] for name, leaf in adapters["layers/query"].items()}
    with pytest.raises(ValueError, match="the adapter of 'layers/query' has down"):
        function(params, {"layers/query": mixed})
    with pytest.raises(ValueError, match="without an adapter; merge an earlier one"):
        function(attach_lora(params, adapters), adapters)
