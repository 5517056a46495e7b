"""Masks: canonical form, application, random and top-k masks, counts and reports."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from icmljax.sparsity.masks import (
    LayerSparsity,
    apply_masks,
    as_masks,
    count,
    densities_of,
    density_of,
    global_top_k,
    random_mask,
    random_masks,
    report,
    top_k_mask,
)

PARAMS = {
    "hidden": {"w": jnp.ones((3, 4, 5)), "b": jnp.ones((3, 5))},
    "out": [jnp.full((5, 2), jnp.nan), jnp.array(7, jnp.int32)],
}
OUT = np.arange(10).reshape(5, 2) % 3 == 0
MASKS = {
    "hidden": {"w": np.arange(60).reshape(3, 4, 5) < 30, "b": None},
    "out": [OUT, False],
}


def num_stacked(path, leaf):
    return 1 if path.startswith("hidden/w") else 0


# ------------------------------------------------------------------------------ canonical form


def test_canonical_form():
    masks = as_masks(PARAMS, MASKS)
    assert jax.tree.structure(masks) == jax.tree.structure(PARAMS)
    assert all(m.dtype == bool for m in jax.tree.leaves(masks))
    assert masks["hidden"]["b"].shape == () and masks["hidden"]["b"]
    assert masks["out"][1].shape == () and not masks["out"][1]
    np.testing.assert_array_equal(masks["out"][0], OUT)
    again = as_masks(jax.eval_shape(lambda: PARAMS), masks)
    jax.tree.map(np.testing.assert_array_equal, again, masks)


def test_containers_may_differ_and_holes_stay():
    params = {"a": (jnp.ones(3), None), "b": optax.MaskedNode(), "c": {"d": jnp.ones(2)}}
    masks = {"a": [True, np.ones(2, bool)], "b": {"w": False, "x": [None]}, "c": {"d": None}}
    found = as_masks(params, masks)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert found["a"][1] is None and found["b"] == optax.MaskedNode()


def test_a_bare_array_is_a_tree():
    assert as_masks(jnp.ones(3), None).shape == ()
    mask = np.array([True, False, True])
    np.testing.assert_array_equal(apply_masks(jnp.arange(3.0), mask), [0, 0, 2])


def _with(path, mask):
    masks = jax.tree.map(lambda x: x, MASKS, is_leaf=lambda x: x is None)
    node = masks
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = mask
    return masks


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "mask", "message"),
    [
        (
            ("out", 0),
            np.ones((2, 5), bool),
            r"mask of 'out/0' has shape \(2, 5\), expected \(5, 2\)",
        ),
        (("out", 0), np.ones((1, 5, 2), bool), "mask of 'out/0' has shape"),
        (
            ("hidden", "w"),
            np.ones((3, 4, 5)),
            "mask of 'hidden/w' has dtype float32, expected bool",
        ),
        (("hidden", "w"), 1, "mask of 'hidden/w' has dtype int32"),
        (("hidden", "more"), True, r"missing \[\], unexpected \['hidden/more'\]"),
        (("hidden",), {"b": None}, r"missing \['hidden/w'\], unexpected \[\]"),
        (("hidden",), None, r"missing \['hidden/b', 'hidden/w'\], unexpected \['hidden'\]"),
    ],
)
def test_what_does_not_fit_is_named(path, mask, message):
    with pytest.raises(ValueError, match=message):
        as_masks(PARAMS, _with(path, mask))


def test_masks_that_broadcast():
    kernel, taps = jnp.ones((3, 3, 2, 4)), np.eye(2, 4, dtype=bool)
    assert float(apply_masks(kernel, taps).sum()) == 9 * 2
    assert densities_of(kernel, taps) == 0.25


# ------------------------------------------------------------------------------------ applying


def test_masked_entries_are_plus_zero_whatever_they_were():
    found = apply_masks({"w": jnp.array([-1.0, jnp.nan, jnp.inf, 2.0])}, {"w": np.arange(4) == 3})
    assert np.asarray(found["w"]).tobytes() == np.array([0, 0, 0, 2], np.float32).tobytes()


def test_dtypes_stay_and_transformations_agree():
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.arange(3)}
    masks = {"a": np.arange(3) > 0, "b": False}
    found = apply_masks(params, masks)
    assert found["a"].dtype == jnp.bfloat16 and found["b"].dtype == jnp.int32
    compiled = jax.jit(apply_masks)(params, as_masks(params, masks))
    jax.tree.map(np.testing.assert_array_equal, compiled, found)
    many = jax.vmap(lambda p, m: apply_masks(p, m), in_axes=(None, 0))(
        jnp.arange(1.0, 4.0), jnp.eye(3, dtype=bool)
    )
    np.testing.assert_array_equal(many, np.diag([1.0, 2.0, 3.0]))
    grad = jax.grad(lambda p: apply_masks({"w": p}, {"w": np.arange(3) > 0})["w"].sum())
    np.testing.assert_array_equal(grad(jnp.ones(3)), [0, 1, 1])


# ------------------------------------------------------------------------------------ counting


def test_densities_and_counts():
    mask = jnp.asarray(OUT)
    assert count(mask) == 4 and density_of(mask) == np.float32(0.4)
    assert density_of(mask).dtype == jnp.float32 and density_of(jnp.zeros((0, 2), bool)) == 0
    found = densities_of(PARAMS, MASKS)
    assert found == {"hidden": {"w": 0.5, "b": None}, "out": [0.4, None]}
    by_layer = densities_of(PARAMS, MASKS, stacked=num_stacked)
    np.testing.assert_array_equal(by_layer["hidden"]["w"], [1, 0.5, 0])


def test_report():
    rows = report(PARAMS, MASKS, stacked=num_stacked)
    assert rows == (
        LayerSparsity("hidden/b", (3, 5), 15, 15, 1.0),
        LayerSparsity("hidden/w[0]", (4, 5), 20, 20, 1.0),
        LayerSparsity("hidden/w[1]", (4, 5), 20, 10, 0.5),
        LayerSparsity("hidden/w[2]", (4, 5), 20, 0, 0.0),
        LayerSparsity("out/0", (5, 2), 10, 4, 0.4),
        LayerSparsity("out/1", (), 1, 0, 0.0),
        LayerSparsity("total", (), 86, 49, 49 / 86),
    )
    assert [row.path for row in report(PARAMS, MASKS)][:2] == ["hidden/b", "hidden/w"]


# -------------------------------------------------------------------------------------- random


@pytest.mark.parametrize("density", [0.0, 0.1, 0.125, 0.5, 1.0])
def test_random_mask_has_the_exact_count(density):
    mask = random_mask(jax.random.key(0), (7, 9), density)
    assert mask.shape == (7, 9) and mask.sum() == round(63 * density)
    stacked = random_mask(jax.random.key(0), (3, 7, 9), np.full(3, density))
    np.testing.assert_array_equal(stacked.sum((1, 2)), np.full(3, round(63 * density)))


def test_random_mask_is_uniform_over_subsets():
    """All 15 pairs out of 6 positions; false alarm in 1 of 1000."""
    keys = jax.random.split(jax.random.key(3), 3000)
    masks = jax.jit(jax.vmap(lambda key: random_mask(key, (2, 3), 1 / 3)))(keys)
    codes = np.asarray(masks).reshape(3000, 6) @ (2 ** np.arange(6))
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == 15 and stats.chisquare(counts).pvalue > 1e-3


def test_bernoulli_masks_fluctuate():
    keys = jax.random.split(jax.random.key(4), 2000)
    draw = jax.jit(jax.vmap(lambda key: random_mask(key, (20,), 0.3, exact=False)))
    counts = np.asarray(draw(keys).sum(1))
    # Binomial(20, 0.3): mean 6 and variance 4.2, each within four standard errors.
    assert abs(counts.mean() - 6) < 4 * np.sqrt(4.2 / 2000)
    assert abs(counts.var() - 4.2) < 4 * 4.2 * np.sqrt(2 / 2000)
    layers = random_mask(jax.random.key(5), (2, 10, 10), np.array([0.0, 1.0]), exact=False)
    np.testing.assert_array_equal(layers.sum((1, 2)), [0, 100])


def test_random_masks_of_a_tree():
    densities = {"hidden": {"w": np.array([0.05, 0.5, 1.0]), "b": None}, "out": [0.4, None]}
    masks = random_masks(jax.random.key(0), PARAMS, densities)
    np.testing.assert_array_equal(masks["hidden"]["w"].sum((1, 2)), [1, 10, 20])
    assert masks["out"][0].sum() == 4 and masks["out"][1].shape == masks["hidden"]["b"].shape == ()
    single = random_masks(
        jax.random.key(0), PARAMS, {"hidden": {"w": 0.5, "b": None}, "out": [None, None]},
        stacked=num_stacked,
    )  # fmt: skip
    layers = np.asarray(single["hidden"]["w"])
    np.testing.assert_array_equal(layers.sum((1, 2)), [10, 10, 10])
    assert (layers[0] != layers[1]).any() and (layers[1] != layers[2]).any()


@pytest.mark.bad_input
@pytest.mark.parametrize("density", [-0.1, 1.1, np.nan, np.ones(2)])
def test_bad_densities(density):
    with pytest.raises(ValueError, match="densit"):
        random_mask(jax.random.key(0), (3, 4), density)
    densities = {"hidden": {"w": density, "b": None}, "out": [None, None]}
    with pytest.raises(ValueError, match="parameter 'hidden/w': densit"):
        random_masks(jax.random.key(0), PARAMS, densities)


# --------------------------------------------------------------------------------------- top-k


@hypothesis.given(st.lists(st.sampled_from([-1.0, 0.0, 0.0, 2.0, np.inf, np.nan]), min_size=1,
                           max_size=12), st.integers(0, 12))  # fmt: skip
@hypothesis.settings(max_examples=40)
def test_top_k_against_a_stable_sort(scores, k):
    k = min(k, len(scores))
    # Padded to one size, so that it compiles once; the padding is never among the k.
    padded = np.array(scores + [-np.inf] * (12 - len(scores)), np.float32)
    clean = np.where(np.isnan(padded), -np.inf, padded)
    expected = np.zeros(12, bool)
    expected[sorted(range(12), key=lambda i: (-clean[i], i))[:k]] = True
    np.testing.assert_array_equal(_top_k(padded.reshape(3, 4), k).ravel(), expected)


_top_k = jax.jit(top_k_mask)


def test_top_k_of_integers_and_all_or_nothing():
    scores = jnp.array([0, 255, 7, 255], jnp.uint8)
    np.testing.assert_array_equal(top_k_mask(scores, 1), [False, True, False, False])
    assert not top_k_mask(scores, 0).any() and top_k_mask(scores, 4).all()
    low = jnp.array([-(2**31), 2**31 - 1], jnp.int32)
    np.testing.assert_array_equal(top_k_mask(low, 1), [False, True])


def test_global_top_k():
    scores = {"a": jnp.array([[3.0, 1.0], [5.0, 2.0]]), "b": None, "c": jnp.array([2.0, 4.0])}
    masks = global_top_k(scores, 4)
    np.testing.assert_array_equal(masks["a"], [[True, False], [True, True]])  # 2.0 comes first here
    np.testing.assert_array_equal(masks["c"], [False, True])
    assert masks["b"].shape == () and masks["b"]
    assert global_top_k({"a": None}, 0)["a"]


@pytest.mark.bad_input
@pytest.mark.parametrize("k", [-1, 5])
def test_top_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"k is {k}; expected 0 <= k <= 4"):
        top_k_mask(jnp.zeros(4), k)
