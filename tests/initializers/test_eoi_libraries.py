"""Networks of flax (linen, nnx), haiku and equinox, drawn anew; their layers with our functions."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from icmljax.initializers import eoi
from icmljax.sparsity.densities import layer_densities
from tests.initializers.common import orthogonality_error

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 12))


def assert_isometric(apply_fn, params, scale):
    """Two square linear layers and zero biases: every singular value is scale^2."""
    spectrum = eoi.jacobian_spectrum(apply_fn, params, X)
    np.testing.assert_allclose(spectrum, scale**2, rtol=1e-5)


def assert_drawn(old, params, masks, densities, name, layout_of=eoi.channels_last):
    assert jax.tree.structure(params) == jax.tree.structure(old) == jax.tree.structure(masks)
    rows = eoi.report(params, masks, densities, 1.1, layout_of=layout_of)
    assert len(rows) == 2 and all(name in row.path for row in rows)
    for row in rows:
        assert row.error < 2e-6 and row.density == pytest.approx(0.4, abs=1 / 24 + 1e-9)


def test_linen():
    model = nn.Sequential([nn.Dense(12), nn.Dense(12)])
    old = model.init(KEY, X)["params"]
    densities = layer_densities(old, 0.4)
    params, masks = eoi.reinit_tree(KEY, old, densities, 1.1)
    assert_drawn(old, params, masks, densities, "kernel")
    assert_isometric(lambda p, x: model.apply({"params": p}, x), params, 1.1)
    biased, _ = eoi.reinit_tree(KEY, old, densities, 1.1, 0.5)
    assert biased["layers_0"]["bias"].std() > 0.1


def test_linen_layers_take_the_initializers():
    dense = nn.Dense(12, kernel_init=eoi.orthogonal(0.4))
    assert orthogonality_error(dense.init(KEY, X)["params"]["kernel"]) < 2e-6
    images = jnp.zeros((1, 5, 5, 8))
    conv = nn.Conv(8, (3, 3), feature_group_count=8,
                   kernel_init=eoi.delta_orthogonal(0.4, feature_group_count=8))  # fmt: skip
    kernel = np.asarray(conv.init(KEY, images)["params"]["kernel"])
    np.testing.assert_array_equal(np.abs(kernel[1, 1]), 1)


def test_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(12, 12, rngs=rngs)
            self.second = nnx.Linear(12, 12, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    graph, old = nnx.split(Net(nnx.Rngs(0)))
    densities = layer_densities(old, 0.4)
    params, masks = eoi.reinit_tree(KEY, old, densities, 1.1, 0.5)
    assert_drawn(old, params, masks, densities, "kernel")
    assert params["first"]["bias"][...].std() > 0.1
    params, _ = eoi.reinit_tree(KEY, old, densities, 1.1)
    assert_isometric(lambda p, x: nnx.merge(graph, p)(x), params, 1.1)


def test_nnx_layers_take_the_initializers():
    linear = nnx.Linear(12, 12, kernel_init=eoi.orthogonal(0.4), rngs=nnx.Rngs(0))
    assert orthogonality_error(linear.kernel[...]) < 2e-6


def test_haiku():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([12, 12], activation=_same)(x)))
    old = model.init(KEY, X)
    densities = layer_densities(old, 0.4)
    params, masks = eoi.reinit_tree(KEY, old, densities, 1.1)
    assert_drawn(old, params, masks, densities, "w")
    assert_isometric(model.apply, params, 1.1)
    biased, _ = eoi.reinit_tree(KEY, old, densities, 1.1, 0.5)
    assert biased["mlp/~/linear_0"]["b"].std() > 0.1


def _same(x):
    return x


def test_equinox():
    model = eqx.nn.MLP(12, 12, 12, 1, activation=_same, key=KEY)
    old, static = eqx.partition(model, eqx.is_array)
    densities = layer_densities(old, 0.4)
    params, masks = eoi.reinit_tree(KEY, old, densities, 1.1, layout_of=eoi.channels_first)
    assert_drawn(old, params, masks, densities, "weight", eoi.channels_first)
    assert_isometric(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, 1.1)
    biased, _ = eoi.reinit_tree(KEY, old, densities, 1.1, 0.5, layout_of=eoi.channels_first)
    assert biased.layers[0].bias.std() > 0.1


def test_equinox_convolution():
    conv = eqx.nn.Conv2d(8, 16, (3, 5), padding=(1, 2), key=KEY)
    old, static = eqx.partition(conv, eqx.is_array)
    densities = eqx.tree_at(lambda t: (t.weight, t.bias), old, (0.2, None))
    params, masks = eoi.reinit_tree(KEY, old, densities, layout_of=eoi.channels_first)
    image = jax.random.normal(KEY, (8, 5, 5))
    out = eqx.combine(params, static)(image)
    np.testing.assert_allclose(jnp.linalg.norm(out), jnp.linalg.norm(image), rtol=1e-5)
    assert masks.weight.sum() == round(0.2 * 1920)
