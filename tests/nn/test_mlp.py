"""Tests of icmljax.nn.mlp."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.nn.mlp import MLP, DeepMLP


def test_is_a_chain_of_matrix_products_and_activations():
    model = MLP([48, 32, 10], activation=nn.tanh)
    inputs = jax.random.normal(jax.random.key(0), (2, 5, 64))
    params = model.init(jax.random.key(1), inputs)
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases that show
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 65 * 48 + 49 * 32 + 33 * 10
    hidden = np.asarray(inputs, np.float64)
    for index in range(3):
        layer = params["params"][f"dense_{index}"]
        hidden = hidden @ np.float64(layer["kernel"]) + np.float64(layer["bias"])
        hidden = np.tanh(hidden) if index < 2 else hidden
    np.testing.assert_allclose(model.apply(params, inputs), hidden, rtol=1e-4, atol=1e-5)


def test_default_activation_is_relu_and_vmap_over_seeds_is_a_loop():
    model = MLP((16, 3))
    inputs = jax.random.normal(jax.random.key(0), (7, 4))
    keys = jax.random.split(jax.random.key(1), 3)
    params = jax.jit(jax.vmap(model.init, in_axes=(0, None)))(keys, inputs)
    outputs = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(params, inputs)
    init = jax.jit(model.init)
    for index, key in enumerate(keys):
        alone = jax.device_get(init(key, inputs))["params"]
        hidden = np.maximum(np.asarray(inputs) @ alone["dense_0"]["kernel"], 0)
        expected = hidden @ alone["dense_1"]["kernel"]
        np.testing.assert_allclose(outputs[index], expected, rtol=1e-4, atol=1e-6)


def test_deep_mlp_is_a_chain_of_its_stacked_layers():
    inputs = jax.random.normal(jax.random.key(0), (2, 5, 7))
    params = jax.device_get(jax.jit(DeepMLP(6, 16, 3).init)(jax.random.key(1), inputs))
    params = jax.tree.map(lambda p: p + np.float32(0.1), params)  # biases that show
    p = jax.tree.map(np.float64, params["params"])
    inputs = np.asarray(inputs)
    assert p["hidden"]["kernel"].shape == (4, 16, 16) and p["hidden"]["bias"].shape == (4, 16)
    # Every layer has weights of its own.
    assert len(np.unique(p["hidden"]["kernel"].reshape(4, -1), axis=0)) == 4
    hidden = np.tanh(inputs @ p["input"]["kernel"] + p["input"]["bias"])
    for kernel, bias in zip(p["hidden"]["kernel"], p["hidden"]["bias"], strict=True):
        hidden = np.tanh(hidden @ kernel + bias)
    expected = hidden @ p["output"]["kernel"] + p["output"]["bias"]
    for unroll in (1, 3):
        outputs = jax.jit(DeepMLP(6, 16, 3, unroll=unroll).apply)(params, inputs)
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_a_thousand_layers_pass_the_gradient_on():
    """With orthogonal weights and no activation nothing grows or shrinks on the way."""
    model = DeepMLP(1000, 8, 8, lambda x: x, nn.initializers.orthogonal())
    inputs = jax.random.normal(jax.random.key(0), (1, 8))
    gradient = jax.jit(jax.grad(lambda inputs, p: jnp.sum(model.apply(p, inputs))))
    params = jax.jit(model.init)(jax.random.key(1), inputs)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1000 * 8 * 9
    norm = jnp.linalg.norm(gradient(inputs, params))
    np.testing.assert_allclose(norm, jnp.sqrt(8.0), rtol=1e-3)


def test_deep_mlp_in_bfloat16():
    model = DeepMLP(4, 16, 3, dtype=jnp.bfloat16)
    inputs = jax.random.normal(jax.random.key(0), (5, 7))
    params = jax.jit(model.init)(jax.random.key(1), inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    outputs = jax.jit(model.apply)(params, inputs)
    exact = jax.jit(DeepMLP(4, 16, 3).apply)(params, inputs)
    assert outputs.dtype == jnp.float32
    assert 1e-5 < jnp.abs(outputs - exact).max() < 5e-2


@pytest.mark.bad_input
def test_no_layers():
    with pytest.raises(ValueError, match="features is empty"):
        MLP([]).init(jax.random.key(0), jnp.zeros((1, 2)))


@pytest.mark.bad_input
def test_too_few_layers():
    with pytest.raises(ValueError, match="depth must be at least 3, got 2"):
        DeepMLP(2, 8, 3).init(jax.random.key(0), jnp.zeros((1, 2)))
