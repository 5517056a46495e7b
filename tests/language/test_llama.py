"""The backbone: golden numbers of a real model, and what must not change a result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.language import llama
from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BlockQuantized, LowRank, linear, quantize, weight_bytes
from icmljax.training import mesh as mesh_lib
from tests.language.conftest import TINY, draw_params, load_golden

EXPERTS = dataclasses.replace(TINY, num_experts=4)


@pytest.fixture(scope="module")
def reference(tiny, prompts):
    """Logits of the tiny model."""
    return llama.forward(tiny[1], tiny[0], prompts[0])


@pytest.fixture(scope="module")
def golden():
    return load_golden("forward_a")


@pytest.fixture(scope="module")
def real_run(smollm2, golden):
    """Logits, residual streams, and what the attention of layer 0 got and gave."""
    config, params = smollm2
    ids, lengths = golden["ids"], golden["lengths"]
    tokens = jnp.where(jnp.arange(ids.shape[1]) < lengths[:, None], ids, 0)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    plain = llama.causal_attention(config.rope, positions)

    def attention(layer, query, key, value, state):
        mixed, state, _ = plain(layer, query, key, value, state)
        return mixed, state, (query, key, value, mixed)

    @jax.jit
    def run(params, tokens):
        result = llama.hidden_states(
            params, config, llama.embed(params, tokens), attention, return_layers=True
        )
        first = jax.tree.map(lambda leaf: leaf[0, 0], result.collected)
        return llama.logits(params, result.hidden), result.layers, first

    return run(params, tokens)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_of_the_real_model(golden, real_run, prompt):
    length = golden["lengths"][prompt]
    logits = np.asarray(real_run[0])[prompt, :length]
    expected = golden["logit_vals"][prompt, :length]
    np.testing.assert_allclose(logits[:, golden["logit_cols"]], expected, atol=5e-4)
    largest = np.argsort(-logits[-1])[:20]
    np.testing.assert_array_equal(largest, golden["top20_ids"][prompt])
    np.testing.assert_allclose(logits[-1, largest], golden["top20_logits"][prompt], atol=5e-4)
    ids = golden["ids"][prompt, 1:length]
    losses = -np.asarray(jax.nn.log_softmax(logits[:-1]))[np.arange(length - 1), ids]
    np.testing.assert_allclose(losses, golden["token_nll"][prompt, : length - 1], atol=2e-4)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_residual_stream_of_the_real_model(golden, real_run, prompt):
    last = golden["lengths"][prompt] - 1
    stream = np.asarray(real_run[1])[:, prompt, last].astype(np.float64)
    largest = np.abs(stream).max(axis=1)
    error = np.abs(stream[:, :16] - golden["hidden_last16"][prompt]).max(axis=1)
    assert (error <= 1e-4 * largest).all()
    stats = np.stack([stream.mean(1), np.sqrt((stream**2).mean(1)), largest], axis=1)
    assert (np.abs(stats - golden["hidden_stats"][prompt]) <= 1e-4 * largest[:, None]).all()


def test_first_layer_of_the_real_model(smollm2, golden, real_run):
    config, params = smollm2
    length = golden["lengths"][0]
    query, key, value, mixed = (np.asarray(part)[None, :length] for part in real_run[2])
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    attended = linear(jnp.asarray(mixed), layer["output"], num_in=2)[0]
    positions = jnp.arange(length)[None]

    def interleaved(heads):  # the order of GGUF files
        first, second = np.split(np.asarray(heads), 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(length, -1)[:, :128]

    def turned(heads):
        return config.rope.rotate(jnp.asarray(heads), positions)[0]

    np.testing.assert_allclose(interleaved(query[0]), golden["l0_q0_pre"], atol=2e-4)
    np.testing.assert_allclose(interleaved(turned(query)), golden["l0_q0_post"], atol=2e-4)
    np.testing.assert_allclose(interleaved(turned(key)), golden["l0_k0_post"], atol=2e-4)
    np.testing.assert_allclose(value[0].reshape(length, -1)[:, :128], golden["l0_v0"], atol=2e-4)
    np.testing.assert_allclose(attended[:, :128], golden["l0_attn0"], atol=2e-4)
    before, after = np.asarray(real_run[1])[:2, 0, :length]
    mlp = after - before - np.asarray(attended)
    np.testing.assert_allclose(mlp[:, :128], golden["l0_mlp0"], atol=2e-4)


def test_interleaved_and_half_order_agree(tiny, prompts, reference):
    config, params = tiny
    layers = dict(params["layers"])
    for name in ("query", "key"):
        first, second = jnp.split(layers[name], 2, axis=-1)
        layers[name] = jnp.stack([first, second], axis=-1).reshape(layers[name].shape)
    other = dataclasses.replace(config, rope=Rope(interleaved=True))
    logits = llama.forward({**params, "layers": layers}, other, prompts[0])
    np.testing.assert_allclose(logits, reference, atol=2e-5)


def test_rotary_positions_are_relative():
    rope = Rope(theta=100.0)
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(at, where):
        return jnp.vdot(
            rope.rotate(query, jnp.array([[at]])), rope.rotate(key, jnp.array([[where]]))
        )

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_scaled_frequencies():
    plain = Rope(theta=10_000.0).frequencies(64)
    linear_scaling = Rope(theta=10_000.0, scaling=RopeScaling("linear", 4.0)).frequencies(64)
    np.testing.assert_allclose(linear_scaling, plain / 4, rtol=1e-6)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    scaled = Rope(theta=10_000.0, scaling=scaling).frequencies(64)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_padding_changes_nothing(tiny, prompts, reference):
    config, params = tiny
    tokens, lengths = prompts
    for row, length in enumerate(lengths):
        alone = llama.forward(params, config, tokens[row : row + 1, :length])[0]
        np.testing.assert_allclose(alone, reference[row, :length], atol=2e-5)


def test_packed_documents_do_not_see_each_other(tiny, prompts, reference):
    config, params = tiny
    tokens, _ = prompts
    row = jnp.concatenate([tokens[1, :5], tokens[2, :9], jnp.zeros(2, jnp.int32)])[None]
    positions = jnp.array([[*range(5), *range(9), 0, 0]])
    segments = jnp.array([[1] * 5 + [2] * 9 + [0] * 2])
    packed = llama.forward(params, config, row, positions=positions, segment_ids=segments)[0]
    np.testing.assert_allclose(packed[:5], reference[1, :5], atol=2e-5)
    np.testing.assert_allclose(packed[5:14], reference[2, :9], atol=2e-5)


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["dense", "experts"])
def test_unrolled_jitted_and_rematerialised_agree(config, prompts):
    params, tokens = draw_params(config), prompts[0]
    expected = llama.forward(params, config, tokens)
    unrolled = llama.forward(llama.unstack_layers(params), config, tokens)
    np.testing.assert_allclose(unrolled, expected, atol=2e-5)
    jitted = jax.jit(llama.forward, static_argnums=1)(params, config, tokens)
    np.testing.assert_allclose(jitted, expected, atol=2e-5)

    def loss(params, config):
        return jnp.mean(jax.nn.logsumexp(llama.forward(params, config, tokens), axis=-1))

    plain = jax.grad(loss)(params, config)
    again = jax.grad(loss)(params, dataclasses.replace(config, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, plain)


def test_no_token_sees_the_future(tiny, prompts, reference):
    config, params = tiny
    tokens, _ = prompts
    changed = tokens.at[:, 6].set((tokens[:, 6] + 1) % config.vocab_size)
    logits = llama.forward(params, config, changed)
    np.testing.assert_array_equal(logits[:, :6], reference[:, :6])
    assert (jnp.abs(logits[:, 6:] - reference[:, 6:]).max(axis=(1, 2)) > 1e-3).all()


def test_vmap_over_models(tiny, prompts):
    config, _ = tiny
    both = jax.vmap(lambda key: llama.init(key, config))(jax.random.split(jax.random.key(3)))
    logits = jax.vmap(lambda params: llama.forward(params, config, prompts[0]))(both)
    first = jax.tree.map(lambda leaf: leaf[0], both)
    np.testing.assert_allclose(logits[0], llama.forward(first, config, prompts[0]), atol=2e-5)


def test_experts_equal_a_loop_over_tokens(prompts):
    config = dataclasses.replace(EXPERTS, num_layers=1)
    params = draw_params(config)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    inputs = jax.random.normal(jax.random.key(5), (2, 7, config.d_model))
    mixed, router = llama._experts(layer, config, inputs)
    np.testing.assert_allclose(jnp.sum(jnp.exp(router), -1), 1, rtol=1e-5)
    rows = inputs.reshape(-1, config.d_model), mixed.reshape(-1, config.d_model)
    for token, got in zip(*rows, strict=True):
        scores = token @ layer["router"]
        chosen = np.argsort(-np.asarray(scores))[: config.experts_per_token]
        gates = jax.nn.softmax(scores[chosen])
        expected = sum(
            gate
            * (jax.nn.silu(token @ layer["gate"][e]) * (token @ layer["up"][e]))
            @ layer["down"][e]
            for gate, e in zip(gates, chosen, strict=True)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_experts_take_all_tokens_of_a_batch(prompts):
    """No capacity: identical tokens all go to the same experts, and none is dropped."""
    params = draw_params(EXPERTS)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    token = jax.random.normal(jax.random.key(6), (1, 1, EXPERTS.d_model))
    alone, _ = llama._experts(layer, EXPERTS, token)
    crowd, _ = llama._experts(layer, EXPERTS, jnp.tile(token, (3, 50, 1)))
    np.testing.assert_allclose(crowd, jnp.broadcast_to(alone, crowd.shape), rtol=1e-4, atol=1e-6)


def test_quantized_weights():
    weight = jax.random.normal(jax.random.key(0), (3, 4, 16, 10))
    inputs = jax.random.normal(jax.random.key(1), (5, 4, 16))
    for bits, bound in ((8, 1 / 254), (4, 1 / 30)):
        packed = quantize(weight, bits, num_in=2, num_lead=1)
        dense = packed.dense()
        assert dense.shape == weight.shape
        # Half a step of each block: 8 bits span 2 max |w|, 4 bits max - min.
        rows = weight.reshape(3, 64, 10).reshape(3, 2, 32, 10)
        span = 2 * jnp.abs(rows).max(2) if bits == 8 else rows.max(2) - rows.min(2)
        error = jnp.abs(dense.reshape(rows.shape) - rows).max(2)
        assert (error <= span * bound * 1.01).all()
        assert float(error.max()) > 0.2 * float((span * bound).max())
        one = jax.tree.map(lambda leaf: leaf[1], packed)
        np.testing.assert_allclose(
            linear(inputs, one, num_in=2), linear(inputs, dense[1], num_in=2), rtol=1e-4, atol=1e-4
        )
        assert weight_bytes(packed) <= weight.nbytes * (bits / 32 + 1 / 16)


def test_quantized_constant_block():
    for bits in (4, 8):
        np.testing.assert_allclose(quantize(jnp.full((32, 2), 0.5), bits).dense(), 0.5, rtol=1e-6)
        np.testing.assert_array_equal(quantize(jnp.zeros((32, 2)), bits).dense(), 0)


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["dense", "experts"])
def test_quantized_model(config, prompts):
    params = draw_params(config)
    packed = llama.quantize_params(params, 8)
    assert isinstance(packed["layers"]["query"], BlockQuantized)
    assert isinstance(packed["embedding"], BlockQuantized)
    assert packed["layers"]["attention_norm"] is params["layers"]["attention_norm"]
    dense = jax.tree.map(
        lambda leaf: leaf.dense() if isinstance(leaf, BlockQuantized) else leaf,
        packed,
        is_leaf=lambda leaf: isinstance(leaf, BlockQuantized),
    )
    for name in ("embedding", "head"):
        dense[name] = dense[name].T
    expected = llama.forward(dense, config, prompts[0])
    np.testing.assert_allclose(llama.forward(packed, config, prompts[0]), expected, atol=5e-5)
    unrolled = llama.forward(llama.unstack_layers(packed), config, prompts[0])
    np.testing.assert_allclose(unrolled, expected, atol=5e-5)


def test_low_rank_weight():
    keys = jax.random.split(jax.random.key(0), 4)
    base = jax.random.normal(keys[0], (4, 8, 6, 5))
    down, up = jax.random.normal(keys[1], (32, 3)), jax.random.normal(keys[2], (3, 30))
    inputs = jax.random.normal(keys[3], (7, 4, 8))
    dense = base + 0.5 * (down @ up).reshape(base.shape)
    for weight in (base, quantize(base, 8, num_in=2)):
        merged = dense if weight is base else dense - base + weight.dense()
        got = linear(inputs, LowRank(weight, down, up, 0.5), num_in=2)
        np.testing.assert_allclose(got, linear(inputs, merged, num_in=2), rtol=1e-4, atol=1e-4)


def test_bfloat16_keeps_a_float32_stream(tiny, prompts, reference):
    config, params = tiny
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = llama.forward(half, config, prompts[0], dtype=jnp.bfloat16)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference, atol=0.05 * float(jnp.abs(reference).max()))


def test_counts(tiny):
    config, params = tiny
    assert llama.num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert llama.num_parameters(llama.CONFIGS["smollm2-135m"]) == 134_515_008
    assert llama.num_parameters(llama.CONFIGS["llama2-7b"]) == 6_738_415_616
    assert llama.num_parameters(llama.CONFIGS["mixtral-8x7b"]) == 46_702_792_704
    assert llama.flops_per_token(llama.CONFIGS["smollm2-135m"], 0) == pytest.approx(
        0.27e9, rel=0.01
    )


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["dense", "experts"])
def test_eight_devices_equal_one(config, prompts):
    params = draw_params(config)
    tokens = jnp.concatenate([prompts[0], prompts[0][:3]])
    expected = llama.forward(params, config, tokens)
    mesh = mesh_lib.make_mesh("data=4,model=2")
    shardings = mesh_lib.param_shardings(params, llama.sharding_rules(config, mesh), mesh)
    assert shardings["layers"]["query"].spec == P(None, "data", "model", None)
    placed = jax.device_put(params, shardings)
    rows = NamedSharding(mesh, P("data"))
    run = jax.jit(
        lambda params, tokens: llama.forward(params, config, tokens, activation_sharding=rows)
    )
    np.testing.assert_allclose(run(placed, jax.device_put(tokens, rows)), expected, atol=5e-5)


def test_heads_that_do_not_divide_are_replicated_with_a_warning(caplog):
    config = llama.CONFIGS["smollm2-135m"]
    mesh = mesh_lib.make_mesh("data=4,model=2")
    with caplog.at_level("WARNING"):
        rules = llama.sharding_rules(config, mesh)
    assert "9 query heads and 3 key and value heads do not divide over model=2" in caplog.text
    assert "1, 3" in caplog.text
    shardings = mesh_lib.param_shardings(llama.abstract_params(config), rules, mesh)
    assert shardings["layers"]["query"].spec == P(None, "data", None, None)
    assert shardings["layers"]["up"].spec == P(None, "data", "model")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 4}, "num_heads=6 is no multiple of num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0 and finite, got 0.0"),
        ({"norm_eps": float("inf")}, "norm_eps must be above 0 and finite, got inf"),
        ({"num_experts": 1}, "num_experts=1 must be 0 or at least experts_per_token=2"),
        ({"num_experts": -1}, "num_experts=-1 must be 0"),
    ],
)
def test_bad_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.bad_input
@pytest.mark.parametrize("size", [2.0, True, "2", None])
def test_sizes_of_another_type(size):
    with pytest.raises(TypeError, match=f"num_layers must be an int, got {size!r}"):
        dataclasses.replace(TINY, num_layers=size)


@pytest.mark.bad_input
def test_bad_rope():
    for theta in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"theta must be above 0 and finite, got {theta}"):
            Rope(theta=theta)
    with pytest.raises(ValueError, match="unknown rope scaling 'yarn'"):
        RopeScaling("yarn", 2.0)
    with pytest.raises(ValueError, match="scaling must be above 0 and finite, got -1"):
        RopeScaling("linear", -1)
    with pytest.raises(ValueError, match="llama3 rope scaling needs 0 < low"):
        RopeScaling("llama3", 8.0, 4.0, 1.0)


@pytest.mark.bad_input
def test_bad_tokens(tiny):
    config, params = tiny
    with pytest.raises(ValueError, match="tokens are float32; expected integers"):
        llama.forward(params, config, jnp.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(batch, time\)"):
        llama.forward(params, config, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"shape \(2, 0\); expected \(batch, time\)"):
        llama.forward(params, config, jnp.zeros((2, 0), jnp.int32))


@pytest.mark.bad_input
def test_bad_quantization():
    with pytest.raises(ValueError, match="bits=3; blocks are made of 4 or 8 bits"):
        quantize(jnp.zeros((32, 2)), 3)
    with pytest.raises(ValueError, match="33 entries, which is no multiple of 32"):
        quantize(jnp.zeros((33, 2)), 8)
