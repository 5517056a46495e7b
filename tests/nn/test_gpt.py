"""Tests of icmljax.nn.gpt."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.nn.cross_entropy import cross_entropy, cross_entropy_chunked
from icmljax.nn.gpt import (
    GPT,
    GPT_RULES,
    CausalSelfAttention,
    GPTConfig,
    decay_mask,
    flops_per_token,
    gelu,
    num_parameters,
)

SMALL = GPTConfig(vocab_size=96, block_size=16, num_layers=3, num_heads=4, d_model=32)
BIASED = dataclasses.replace(SMALL, use_bias=True)
GPT2_MEDIUM = GPTConfig(num_layers=24, num_heads=16, d_model=1024)

# Jitted where it is called often: a jitted forward pass compiles once, an eager one op by op.
_init = jax.jit(lambda model, key: model.init(key, jnp.zeros((1, 1), jnp.int32)), static_argnums=0)
_apply = jax.jit(lambda model, params, tokens: model.apply(params, tokens), static_argnums=0)


def _tokens(config=SMALL, batch=8, time=16, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, config.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def _shaken(model, seed=0):
    """Parameters large enough for every term to matter, norms and biases included."""
    params = _init(model, jax.random.key(seed))
    leaves, treedef = jax.tree.flatten(params)
    noise = jax.random.normal(jax.random.key(seed + 100), (sum(x.size for x in leaves),))
    pieces = jnp.split(noise, np.cumsum([x.size for x in leaves])[:-1])
    shaken = [x + 0.2 * e.reshape(x.shape) for x, e in zip(leaves, pieces, strict=True)]
    return jax.tree.unflatten(treedef, shaken)


def _loss(model, params, tokens, targets, **kwargs):
    return cross_entropy(model.apply(params, tokens, **kwargs), targets)


_loss_and_grad = jax.jit(jax.value_and_grad(_loss, argnums=1), static_argnums=0)


def _assert_trees_close(actual, expected, rtol=1e-4):
    """Every leaf agrees, measured by the size of the leaf: small entries are sums of large ones."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < rtol, f"{jax.tree_util.keystr(path)}: {error}"


# The definition


def _reference(params, tokens, num_heads):
    """GPT-2's forward pass, one sequence, one head and one layer at a time, in float64."""
    erf = np.vectorize(math.erf)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    embedding, positions = p["token_embedding"]["embedding"], p["position_embedding"]["embedding"]

    def norm(x, q):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return normed * q["scale"] + q.get("bias", 0)

    logits = []
    for sequence in np.asarray(tokens):
        time = len(sequence)
        x = embedding[sequence] + positions[:time]
        for layer in range(p["blocks"]["mlp_norm"]["scale"].shape[0]):
            q = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p["blocks"])
            qkv, projection = q["attention"]["qkv"], q["attention"]["projection"]
            normed, update = norm(x, q["attention_norm"]), projection.get("bias", 0)
            for head in range(num_heads):
                query, key, value = (
                    normed @ qkv["kernel"][:, i, head]
                    + (qkv["bias"][i, head] if "bias" in qkv else 0)
                    for i in range(3)
                )
                scores = query @ key.T / np.sqrt(query.shape[-1])
                for t in range(time):
                    weights = np.exp(scores[t, : t + 1] - scores[t, : t + 1].max())
                    mixed = weights @ value[: t + 1] / weights.sum()
                    row = np.zeros_like(x)
                    row[t] = mixed @ projection["kernel"][head]
                    update = update + row
            x = x + update
            expanded = norm(x, q["mlp_norm"]) @ q["expand"]["kernel"] + q["expand"].get("bias", 0)
            activated = 0.5 * expanded * (1 + erf(expanded / np.sqrt(2)))
            x = x + activated @ q["contract"]["kernel"] + q["contract"].get("bias", 0)
        logits.append(norm(x, p["final_norm"]) @ embedding.T)
    return np.stack(logits)


@pytest.mark.parametrize("config", [SMALL, BIASED], ids=["no bias", "bias"])
def test_forward_pass_is_gpt2s(config):
    model, tokens = GPT(config), _tokens(batch=2, time=11)
    params = _shaken(model)
    logits = _apply(model, params, tokens)
    assert logits.shape == (2, 11, 96) and logits.dtype == jnp.float32
    expected = _reference(params, tokens, config.num_heads)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_gelu_and_its_derivative():
    x = np.linspace(-6, 6, 241)
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gelu(jnp.float32(x)), x * cdf, rtol=1e-5, atol=1e-6)
    derivative = jax.vmap(jax.grad(gelu))(jnp.float32(x))
    np.testing.assert_allclose(derivative, cdf + x * density, rtol=1e-5, atol=1e-6)
    assert gelu(jnp.bfloat16(x)).dtype == jnp.bfloat16


def test_later_tokens_change_nothing_before_them():
    model, tokens = GPT(SMALL), _tokens()
    params = _shaken(model)
    logits = _apply(model, params, tokens)
    changed = _apply(model, params, tokens.at[:, 9].add(1) % SMALL.vocab_size)
    np.testing.assert_array_equal(changed[:, :9], logits[:, :9])
    assert (np.abs(changed[:, 9:] - logits[:, 9:]).max(axis=-1) > 1e-3).all()
    # A shorter sequence sees the same positions.
    short = _apply(model, params, tokens[:, :5])
    np.testing.assert_allclose(short, logits[:, :5], rtol=1e-4, atol=1e-4)


# Parameters


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTConfig(), 124_373_760),
        (GPT2_MEDIUM, 354_599_936),
        # GPT-2 itself, as released: 124,439,808 parameters.
        (GPTConfig(vocab_size=50257, use_bias=True), 124_439_808),
        (BIASED, None),
    ],
)
def test_parameter_count(config, expected):
    init = GPT(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    counted = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert num_parameters(config) == counted
    assert expected in (None, counted)


def test_initial_statistics():
    config = GPTConfig(vocab_size=512, block_size=64, num_layers=8, num_heads=4, d_model=64)
    model = GPT(dataclasses.replace(config, use_bias=True))
    params = _init(model, jax.random.key(0))["params"]
    blocks, residual = params["blocks"], 0.02 / math.sqrt(16)
    for array, std in [
        (params["token_embedding"]["embedding"], 0.02),
        (params["position_embedding"]["embedding"], 0.02),
        (blocks["attention"]["qkv"]["kernel"], 0.02),
        (blocks["expand"]["kernel"], 0.02),
        (blocks["attention"]["projection"]["kernel"], residual),
        (blocks["contract"]["kernel"], residual),
    ]:
        leaf = np.asarray(array)
        # Standard errors of mean and deviation; a correct init exceeds 6 of them once in 1e8 runs.
        error = std / math.sqrt(leaf.size)
        assert abs(leaf.mean()) < 6 * error
        assert abs(leaf.std() - std) < 6 * error / math.sqrt(2)
    # Layers differ; norms are the identity and biases zero.
    assert len(np.unique(blocks["expand"]["kernel"][:, 0, 0])) == 8
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            np.testing.assert_array_equal(leaf, 1)
        elif path[-1].key == "bias":
            np.testing.assert_array_equal(leaf, 0)
    # The first predictions are close to uniform.
    tokens = _tokens(config, time=65)
    loss = cross_entropy(_apply(model, {"params": params}, tokens[:, :-1]), tokens[:, 1:])
    assert abs(loss - math.log(512)) < 0.05


def test_embedding_is_tied():
    """Its gradient is the sum of what flows through the input and through the output."""
    model, tokens = GPT(SMALL), _tokens(time=17)
    params = _shaken(model)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    @jax.jit
    def untied(params, output_embedding):
        hidden, _ = model.apply(params, inputs, method="hidden_states")
        return cross_entropy(hidden @ output_embedding.T, targets)

    embedding = params["params"]["token_embedding"]["embedding"]
    through_input, through_output = jax.grad(untied, argnums=(0, 1))(params, embedding)
    through_input = through_input["params"]["token_embedding"]["embedding"]
    _, gradient = _loss_and_grad(model, params, inputs, targets)
    actual = gradient["params"]["token_embedding"]["embedding"]
    _assert_trees_close(actual, through_input + through_output)
    assert np.abs(through_input).max() > 1e-3 and np.abs(through_output).max() > 1e-3


def test_decay_mask_keeps_norms_and_biases():
    shapes = jax.eval_shape(GPT(BIASED).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    mask = decay_mask(shapes)
    assert jax.tree.structure(mask) == jax.tree.structure(shapes)
    decayed = jax.tree.map(lambda leaf, decays: leaf.size * decays, shapes, mask)
    d_model, layers = SMALL.d_model, SMALL.num_layers
    assert sum(jax.tree.leaves(decayed)) == (96 + 16) * d_model + 12 * layers * d_model**2


# Cost


def test_flops_per_token():
    # 6 x (85.0M weights of the blocks + 38.6M of the output layer) + attention's 113M.
    assert flops_per_token(GPTConfig()) == 854_654_976
    # One layer, so that the compiler's count is complete; its products are nearly all there is.
    config = GPTConfig(vocab_size=512, block_size=128, num_layers=1, num_heads=2, d_model=128)
    model = GPT(config)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    compiled = _loss_and_grad.lower(model, params, tokens, tokens).compile()
    counted = compiled.cost_analysis()["flops"] / (2 * 128)
    assert 1 <= counted / flops_per_token(config) < 1.1


# Variants that compute the same


def test_remat_changes_nothing():
    tokens = _tokens(time=17)
    config = dataclasses.replace(SMALL, dropout=0.3)
    model = GPT(config)
    remat = GPT(dataclasses.replace(config, remat=True))
    params = _shaken(model)

    def value_and_grad(model):
        def loss(params):
            logits = model.apply(
                params, tokens[:, :-1], deterministic=False, rngs={"dropout": jax.random.key(3)}
            )
            return cross_entropy(logits, tokens[:, 1:])

        return jax.jit(jax.value_and_grad(loss))

    assert jax.tree.structure(_init(remat, jax.random.key(0))) == jax.tree.structure(params)
    (loss, gradient), (remat_loss, remat_gradient) = (
        value_and_grad(model)(params),
        value_and_grad(remat)(params),
    )
    np.testing.assert_allclose(remat_loss, loss, rtol=1e-6)
    _assert_trees_close(remat_gradient, gradient)
    # It does keep less: without dropout, by what the attention weights alone take.
    sizes = [
        value_and_grad(m).lower(params).compile().memory_analysis().temp_size_in_bytes
        for m in (model, remat)
    ]
    attention_weights = 8 * SMALL.num_heads * 16 * 16 * 4
    assert sizes[1] < sizes[0] - (SMALL.num_layers - 1) * attention_weights


def test_scan_over_layers_is_a_loop_over_blocks():
    """A deeper stack made of the layers of another: the last ones do nothing with zero kernels."""
    model, deep = GPT(SMALL), GPT(dataclasses.replace(SMALL, num_layers=5))
    params = _shaken(model)["params"]
    blocks = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1)), params["blocks"]
    )
    tokens = _tokens()
    np.testing.assert_allclose(
        _apply(deep, {"params": params | {"blocks": blocks}}, tokens),
        _apply(model, {"params": params}, tokens),
        rtol=1e-5,
        atol=1e-5,
    )
    swapped = jax.tree.map(lambda x: x[::-1], params["blocks"])
    different = _apply(model, {"params": params | {"blocks": swapped}}, tokens)
    assert np.abs(different - _apply(model, {"params": params}, tokens)).max() > 0.1


def test_jit_is_eager():
    model, tokens = GPT(SMALL), _tokens(batch=2)
    params = _shaken(model)
    jitted, eager = _apply(model, params, tokens), model.apply(params, tokens)
    np.testing.assert_allclose(jitted, eager, rtol=1e-4, atol=1e-4)


def test_vmap_over_seeds_is_a_loop():
    model = GPT(SMALL)
    tokens = jnp.stack([_tokens(time=17, seed=seed) for seed in range(3)])
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.vmap(lambda key: _init(model, key))(keys)
    losses, gradients = jax.vmap(lambda *args: _loss_and_grad(model, *args))(
        params, inputs, targets
    )
    assert len(np.unique(losses)) == 3
    for i in range(3):
        alone = _init(model, keys[i])
        _assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], params), alone)
        loss, gradient = _loss_and_grad(model, alone, inputs[i], targets[i])
        np.testing.assert_allclose(losses[i], loss, rtol=1e-5)
        _assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], gradients), gradient)


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunked_loss_is_the_loss(chunk):
    model, tokens = GPT(SMALL), _tokens(time=17)
    params = _shaken(model)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    @jax.jit
    @jax.value_and_grad
    def chunked(params):
        hidden, embedding = model.apply(params, inputs, method="hidden_states")
        return cross_entropy_chunked(hidden, embedding, targets, chunk)

    loss, gradient = chunked(params)
    expected_loss, expected_gradient = _loss_and_grad(model, params, inputs, targets)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    _assert_trees_close(gradient, expected_gradient)


def test_bfloat16_computes_low_and_sums_high():
    tokens = _tokens(time=17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model, low = GPT(SMALL), GPT(SMALL, dtype=jnp.bfloat16)
    params = _init(low, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    hidden, embedding = jax.eval_shape(
        functools.partial(low.apply, method="hidden_states"), params, inputs
    )
    assert hidden.dtype == embedding.dtype == jnp.bfloat16
    logits = _apply(low, params, inputs)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9  # not rounded on their way
    loss, gradient = _loss_and_grad(model, params, inputs, targets)
    low_loss, low_gradient = _loss_and_grad(low, params, inputs, targets)
    assert low_loss.dtype == jnp.float32
    np.testing.assert_allclose(low_loss, loss, rtol=2e-3)
    _assert_trees_close(low_gradient, gradient, rtol=0.05)
    # Parameters that were cast beforehand give the same.
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    np.testing.assert_allclose(_apply(low, cast, inputs), logits, rtol=0.05, atol=0.005)


def test_dropout():
    tokens = _tokens()
    config = dataclasses.replace(SMALL, dropout=0.5)
    model = GPT(config)
    params = _shaken(model)

    @jax.jit
    def noisy(key):
        return model.apply(params, tokens, deterministic=False, rngs={"dropout": key})

    first = noisy(jax.random.key(0))
    np.testing.assert_array_equal(first, noisy(jax.random.key(0)))
    assert np.abs(first - noisy(jax.random.key(1))).max() > 0.1
    clean = _apply(GPT(SMALL), params, tokens)
    np.testing.assert_array_equal(_apply(model, params, tokens), clean)
    assert np.abs(first - clean).max() > 0.1

    # Layers draw masks of their own: if each adds a dropped-out 1 to a residual stream of zeros,
    # the sums take 4 values in 3 layers, but only 2 if the masks are the same.
    biased = GPT(dataclasses.replace(config, use_bias=True))
    ones = jax.tree.map(jnp.zeros_like, _init(biased, jax.random.key(0)))
    ones["params"]["blocks"]["attention"]["projection"]["bias"] += 1
    ones["params"]["final_norm"]["scale"] += 1
    noisy = functools.partial(biased.apply, method="hidden_states", deterministic=False)
    hidden, _ = jax.jit(noisy)(ones, tokens, rngs={"dropout": jax.random.key(0)})
    assert len(np.unique(hidden[0, 0])) == 4


def test_dropout_acts_on_attention_weights():
    """With values and projection of one the output is the sum of the weights: 1, or 0 and 2."""
    config = dataclasses.replace(BIASED, dropout=0.5)
    attention, hidden = CausalSelfAttention(config, jnp.float32), jnp.zeros((64, 4, 32))
    params = jax.tree.map(jnp.zeros_like, attention.init(jax.random.key(0), hidden, True))
    params["params"]["qkv"]["bias"] += 1
    params["params"]["projection"]["kernel"] += 1 / 32
    np.testing.assert_allclose(attention.apply(params, hidden, True), 1, rtol=1e-5)
    sums = attention.apply(params, hidden, False, rngs={"dropout": jax.random.key(0)})
    # The first position has one weight, dropped or doubled in each of the 4 heads.
    assert set(np.unique(np.round(sums[:, 0], 5))) == {0, 0.5, 1, 1.5, 2}
    # Their mean over 256 weights has a standard deviation of 1 / 16.
    assert abs(sums[:, 0].mean() - 1) < 6 / 16


# Meshes


def _mesh(data, model):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _shardings(params, mesh):
    def sharding(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        specs = [spec for pattern, spec in GPT_RULES if re.search(pattern, name)]
        return NamedSharding(mesh, specs[0] if specs else P())

    return jax.tree_util.tree_map_with_path(sharding, params)


def test_every_rule_shards_and_only_small_parameters_are_whole():
    shapes = jax.eval_shape(GPT(BIASED).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    matched = {}
    for pattern, spec in GPT_RULES:
        names = [name for name in leaves if re.search(pattern, name)]
        assert len(names) == 1, pattern
        assert len(spec) <= leaves[names[0]].ndim
        matched[names[0]] = spec
    whole = {name.split("/", 1)[1] for name in set(leaves) - set(matched)}
    assert {name for name in whole if not re.search(r"norm/(scale|bias)$", name)} == {
        "blocks/attention/projection/bias",
        "blocks/contract/bias",
    }
    for name, spec in matched.items():
        assert ("data" in spec) == (not name.endswith("bias")), name


@pytest.mark.parametrize(("shape", "remat"), [((8, 1), False), ((4, 2), True)])
def test_sharded_is_single_device(shape, remat):
    config = dataclasses.replace(BIASED, remat=remat)
    mesh = _mesh(*shape)
    rows = NamedSharding(mesh, P("data"))
    model, sharded = GPT(config), GPT(config, activation_sharding=rows)
    params, tokens = _shaken(model), _tokens(time=17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    shardings = _shardings(params, mesh)
    step = jax.jit(
        lambda *args: jax.value_and_grad(_loss, argnums=1)(sharded, *args),
        in_shardings=(shardings, rows, rows),
        out_shardings=(NamedSharding(mesh, P()), shardings),
    )
    loss, gradient = step(
        jax.device_put(params, shardings), *jax.device_put((inputs, targets), rows)
    )
    expected_loss, expected_gradient = _loss_and_grad(model, params, inputs, targets)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    _assert_trees_close(jax.device_get(gradient), expected_gradient)
    kernel = gradient["params"]["blocks"]["expand"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8


def test_sharded_population():
    """Seeds under vmap on a mesh: the constraint on the residual stream allows a further axis."""
    mesh = _mesh(8, 1)
    model = GPT(SMALL, activation_sharding=NamedSharding(mesh, P("data")))
    params = jax.tree.map(lambda *x: jnp.stack(x), *(_shaken(GPT(SMALL), s) for s in range(2)))
    tokens = jax.device_put(_tokens(), NamedSharding(mesh, P("data")))
    logits = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(params, tokens)
    expected = _apply(GPT(SMALL), jax.tree.map(lambda x: x[1], params), _tokens())
    np.testing.assert_allclose(logits[1], expected, rtol=1e-4, atol=1e-4)


_MEMORY = """
import jax
jax.config.update("jax_num_cpu_devices", 64)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from icmljax.nn.cross_entropy import cross_entropy_chunked
from icmljax.nn.gpt import GPT, GPTConfig
from tests.nn.test_gpt import _mesh, _shardings

mesh = _mesh(64, 1)
rows = NamedSharding(mesh, P("data"))
model = GPT(GPTConfig(remat=True), activation_sharding=rows)

def loss(params, inputs, targets):
    hidden, embedding = model.apply(params, inputs, method="hidden_states")
    return cross_entropy_chunked(hidden, embedding, targets, 128)

params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
shardings = _shardings(params, mesh)
tokens = jax.ShapeDtypeStruct((2 * 64, 1024), jnp.int32)
step = jax.jit(jax.grad(loss), in_shardings=(shardings, rows, rows), out_shardings=shardings)
print(step.lower(params, tokens, tokens).compile().memory_analysis().temp_size_in_bytes)
"""


def test_gpt2_on_64_devices_fits():
    """Two sequences of 1024 tokens a device; without the constraint it would be 2.6 GB."""
    script = [sys.executable, "-c", textwrap.dedent(_MEMORY)]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1e9


# Bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "d_model=32 is not divisible by num_heads=5"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.bad_input
def test_bad_tokens():
    model = GPT(SMALL)
    params = _init(model, jax.random.key(0))
    with pytest.raises(ValueError, match="17 tokens does not fit block_size=16"):
        model.apply(params, jnp.zeros((1, 17), jnp.int32))
    with pytest.raises(ValueError, match="integer"):
        model.apply(params, jnp.zeros((1, 4), jnp.float32))


def test_tokens_beyond_the_vocabulary_are_loud():
    """Under jit no error can be raised; NaN stops the run instead of training on nonsense."""
    model = GPT(SMALL)
    params = _init(model, jax.random.key(0))
    assert np.isnan(_apply(model, params, jnp.full((1, 4), SMALL.vocab_size))).all()
