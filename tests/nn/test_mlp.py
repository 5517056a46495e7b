"""Tests of icmljax.nn.mlp."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.nn.mlp import MLP


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


@pytest.mark.bad_input
def test_no_layers():
    with pytest.raises(ValueError, match="features is empty"):
        MLP([]).init(jax.random.key(0), jnp.zeros((1, 2)))
