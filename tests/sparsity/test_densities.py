"""Densities of layers: reference numbers, closed forms, exact totals."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.sparsity.densities import layer_densities

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "eoi" / "erk.npz"
METHODS = ("uniform", "erk", "er", "balanced")


def shapes_of(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def total(densities, shapes):
    sizes = [np.prod(shape) for shape in shapes]
    return float(np.dot(densities, sizes) / np.sum(sizes))


@pytest.mark.parametrize("name", ["mlp7", "mlp7b", "cnn"])
def test_erk_equals_the_reference(name):
    with np.load(GOLDEN) as file:
        shapes, target, expected = (file[f"{name}_{x}"] for x in ("shapes", "target", "densities"))
    shapes = [tuple(int(n) for n in (s[:2] if name.startswith("mlp") else s)) for s in shapes]
    found = layer_densities(shapes_of(*shapes), float(target), "erk")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert abs(total(found, shapes) - target) < 1e-12


def test_erk_by_hand():
    """(4, 4): 1/2, (8, 24): 1/6. No layer is full: eps (16/2 + 192/6) = 0.1 * 208."""
    found = layer_densities(shapes_of((4, 4), (8, 24)), 0.1, "erk")
    np.testing.assert_allclose(found, [0.26, 0.26 / 3], rtol=1e-12)
    # Twice as dense again and again: the first fills up, the other takes the rest.
    found = layer_densities(shapes_of((4, 4), (8, 24)), 0.5, "erk")
    np.testing.assert_allclose(found, [1.0, (104 - 16) / 192], rtol=1e-12)


def test_er_leaves_kernel_taps_out():
    kernels = shapes_of((3, 3, 8, 16), (3, 3, 64, 16))
    matrices = shapes_of((8, 16), (64, 16))
    found = layer_densities(kernels, 0.2, "er")
    np.testing.assert_allclose(found, layer_densities(matrices, 0.2, "erk"), rtol=1e-12)
    first = shapes_of((16, 8, 3, 3), (16, 64, 3, 3))
    np.testing.assert_allclose(layer_densities(first, 0.2, "er", er_axes=(1, 0)), found, rtol=1e-12)


def test_balanced_keeps_the_same_number_and_shares_the_rest_anew():
    sizes = np.array([4, 30, 100, 1000])
    found = layer_densities(shapes_of((2, 2), (5, 6), (10, 10), (10, 100)), 0.2, "balanced")
    # 226.8 in all: 4 and 30 are full, the others share 192.8.
    np.testing.assert_allclose(np.array(found) * sizes, [4, 30, 96.4, 96.4], rtol=1e-12)


shape = st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple)


@hypothesis.given(st.lists(shape, min_size=1, max_size=6), st.floats(0.001, 1.0),
                  st.sampled_from(METHODS))  # fmt: skip
@hypothesis.settings(max_examples=150)
def test_totals_are_exact(shapes, density, method):
    found = layer_densities(shapes_of(*shapes), density, method)
    assert all(0 < d <= 1 for d in found)
    assert abs(total(found, shapes) - density) < 1e-12


def test_uniform_skip_knows_numbers_in_names():
    names = ["conv_2", "conv_10", "conv_1", "dense_0"]
    params = {name: {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)} for name in names}
    found = layer_densities(params, 0.3, "uniform_skip")
    assert {name: found[name]["kernel"] for name in names} == {
        "conv_1": 1.0, "conv_2": 0.3, "conv_10": 0.3, "dense_0": 1.0,
    }  # fmt: skip
    del params["dense_0"]  # conv_10 is now the last; in order of characters it would be conv_2
    found = layer_densities(params, 0.3, "uniform_skip")
    assert [found[n]["kernel"] for n in ("conv_1", "conv_2", "conv_10")] == [1.0, 0.3, 1.0]


def test_stacked_layers_are_layers():
    params = {
        "hidden": {"kernel": jnp.zeros((3, 8, 8)), "bias": jnp.zeros((3, 8))},
        "out": {"kernel": jnp.zeros((8, 2)), "bias": jnp.zeros(2)},
    }
    stacked = lambda path, leaf: path.startswith("hidden")  # noqa: E731
    found = layer_densities(params, 0.2, "erk", stacked=stacked)
    flat = layer_densities(shapes_of((8, 8), (8, 8), (8, 8), (8, 2)), 0.2, "erk")
    assert found["hidden"]["bias"] is None and found["out"]["bias"] is None
    np.testing.assert_allclose(found["hidden"]["kernel"], flat[:3], rtol=1e-12)
    np.testing.assert_allclose(found["out"]["kernel"], flat[3], rtol=1e-12)
    skip = layer_densities(params, 0.2, "uniform_skip", stacked=stacked)
    np.testing.assert_array_equal(skip["hidden"]["kernel"], [1, 0.2, 0.2])
    assert skip["out"]["kernel"] == 1.0


def test_what_is_selected():
    params = [
        *shapes_of((4, 4), (4,), (0, 3)),
        *shapes_of((4, 4), dtype=jnp.int32),
        *shapes_of((4, 4), dtype=jnp.bfloat16),
    ]
    assert layer_densities(params, 0.5) == [0.5, None, None, None, 0.5]
    chosen = layer_densities(params, 0.5, filter_fn=lambda path, leaf: path in ("0", "1"))
    assert chosen == [0.5, 0.5, None, None, None]


def test_under_jit():
    """From shapes only: traced parameters will do."""

    def scaled(params):
        return jax.tree.map(lambda p, d: p * d, params, layer_densities(params, 0.25))

    np.testing.assert_array_equal(jax.jit(scaled)([jnp.ones((2, 2))])[0], 0.25 * np.ones((2, 2)))


@pytest.mark.bad_input
@pytest.mark.parametrize("density", [0.0, -0.5, 1.01, float("nan")])
def test_bad_density(density):
    with pytest.raises(ValueError, match=f"density is {density}; expected a number in"):
        layer_densities(shapes_of((4, 4)), density)


@pytest.mark.bad_input
def test_bad_method_and_empty_selection():
    with pytest.raises(ValueError, match="method is 'ERK'; expected one of"):
        layer_densities(shapes_of((4, 4)), 0.5, "ERK")
    with pytest.raises(ValueError, match="selects no leaf"):
        layer_densities(shapes_of((4,)), 0.5)
