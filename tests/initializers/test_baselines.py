"""What EOI is compared with: masked and fixed-degree matrices, approximate isometry, spectra."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.initializers import eoi
from tests.initializers.common import golden, orthogonality_error

KEY = jax.random.key(0)
TRUE = jnp.array(True)


def drawn(init, shape):
    """Compiled as one: these initializers are many small operations."""
    return jax.jit(lambda key: init(key, shape))(KEY)


# ----------------------------------------------------------------------- masked dense orthogonal


@pytest.mark.parametrize("shape", [(16, 24), (3, 3, 8, 16)])
def test_masked_orthogonal_is_a_dense_matrix_under_a_random_mask(shape):
    size = math.prod(shape)
    dense, everywhere = eoi.masked_orthogonal_with_mask(1.0, 1.3)(KEY, shape)
    matrix = np.asarray(dense if len(shape) == 2 else dense[1, 1])
    assert everywhere.all()
    assert orthogonality_error(matrix, 1.3) < 2e-6
    assert np.count_nonzero(dense) == matrix.size
    weights, mask = eoi.masked_orthogonal_with_mask(0.3, 1.3)(KEY, shape)
    assert mask.sum() == round(0.3 * size)
    np.testing.assert_array_equal(weights, np.where(mask, dense, 0))  # the same key's matrix
    assert orthogonality_error(np.where(mask, dense, 0).reshape(-1, shape[-1]), 1.3) > 0.1


def test_masked_orthogonal_of_no_density_is_zero():
    weights, mask = eoi.masked_orthogonal_with_mask(0.0)(KEY, (16, 24))
    assert not weights.any() and not mask.any()


def test_flat_kernel_is_one_matrix_over_taps_and_inputs():
    init = eoi.masked_orthogonal_with_mask(
        1.0, kernel="flat", in_axis=1, out_axis=0, feature_group_count=2
    )
    weights, _ = drawn(init, (16, 8, 3, 3))
    assert np.count_nonzero(weights) == weights.size
    blocks = np.asarray(weights).reshape(2, 8, 72)
    assert orthogonality_error(blocks) < 2e-6
    assert (blocks[0] != blocks[1]).any()


def test_masked_orthogonal_of_stacked_layers():
    densities = np.array([0.2, 0.7])
    weights, mask = drawn(eoi.masked_orthogonal_with_mask(densities, batch_axis=0), (2, 16, 24))
    np.testing.assert_array_equal(np.asarray(mask).sum(axis=(1, 2)), np.rint(densities * 384))
    assert (np.asarray(weights[0] != 0) <= np.asarray(mask[0])).all()
    both = np.asarray(mask[0] & mask[1])
    assert (np.asarray(weights)[0][both] != np.asarray(weights)[1][both]).all()


# ------------------------------------------------------------------------------- fixed degree


@pytest.mark.parametrize(("shape", "degree"), [((12, 24), 6), ((24, 12), 4)])
def test_sao_has_orthogonal_blocks_of_one_degree(shape, degree):
    long = max(shape)
    weights, mask = drawn(eoi.sao_with_mask(degree / long, 1.2), shape)
    weights, mask = np.asarray(weights), np.asarray(mask)
    assert orthogonality_error(weights, 1.2) < 2e-6
    np.testing.assert_array_equal(weights != 0, mask)
    counts = mask.sum(axis=1 if shape[0] <= shape[1] else 0)
    assert (counts == degree).all()
    # Rows of one support, or of none in common.
    rows = (mask if shape[0] <= shape[1] else mask.T).astype(int)
    assert set(np.unique(rows @ rows.T)) <= {0, degree}


def test_sao_draws_its_supports():
    weights, masks = drawn(eoi.sao_with_mask(0.25, batch_axis=0), (3, 16, 16))
    assert orthogonality_error(weights) < 2e-6
    assert (masks[0] != masks[1]).any()
    assert (np.asarray(masks).sum(axis=-1) == 4).all()
    assert (np.asarray(masks).sum(axis=-2) == 4).all()


def test_sao_for_relu_has_four_blocks():
    weights, mask = drawn(eoi.sao_with_mask(0.25, relu=True), (16, 16))
    w = np.asarray(weights)
    np.testing.assert_array_equal(w[:8, :8], w[8:, 8:])
    np.testing.assert_array_equal(w[:8, :8], -w[:8, 8:])
    np.testing.assert_array_equal(w[:8, :8], -w[8:, :8])
    np.testing.assert_array_equal(w != 0, mask)
    assert np.asarray(mask).mean() == 0.25
    assert orthogonality_error(w[:8, :8]) < 2e-6


def test_sao_for_relu_keeps_what_a_relu_splits():
    weights, _ = drawn(eoi.sao_with_mask(0.25, relu=True), (16, 16))
    z = np.linspace(-1, 1, 8, dtype=np.float32)
    split = np.concatenate([np.maximum(z, 0), np.maximum(-z, 0)])
    passed = split @ np.asarray(weights)
    np.testing.assert_allclose(passed[:8], -passed[8:], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(passed[:8]), np.linalg.norm(z), rtol=1e-5)


# ---------------------------------------------------------------------------- approximate isometry


def test_approximate_isometry_is_the_authors():
    case = golden("approx_isometry")
    params = {f"layer{i}": {"weight": case[f"w{i}_before"], "bias": np.ones(3)} for i in range(3)}
    masks = {f"layer{i}": {"weight": case[f"mask{i}"] != 0, "bias": True} for i in range(3)}
    with jax.enable_x64(True):
        done = eoi.approximate_isometry(
            params, jax.tree.map(jnp.asarray, masks), steps=50, layout_of=eoi.channels_first
        )
    loss = {"before": 0.0, "after_50": 0.0}
    for i in range(3):
        mask = case[f"mask{i}"] != 0
        expected = np.where(mask, case[f"w{i}_after_50"], 0)
        weights = np.asarray(done[f"layer{i}"]["weight"])
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
        assert not weights[~mask].any()
        np.testing.assert_array_equal(done[f"layer{i}"]["bias"], 1)
        for when, w in (("before", case[f"w{i}_before"] * mask), ("after_50", weights)):
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            loss[when] += np.linalg.norm(gram - np.eye(len(gram)))
    assert loss["before"] == pytest.approx(float(case["loss_before"]), rel=1e-9)
    assert loss["after_50"] == pytest.approx(float(case["loss_after_50"]), rel=1e-6)


def test_approximate_isometry_keeps_dense_layers_and_starts_at_the_goal():
    weights, mask = eoi.orthogonal_with_mask(0.5, 1.5)(KEY, (16, 24))
    dense = jax.random.normal(KEY, (4, 4))
    params, masks = {"a": weights, "b": dense}, {"a": mask, "b": TRUE}
    done = eoi.approximate_isometry(params, masks, sigma_w=1.5, steps=0)
    jax.tree.map(np.testing.assert_array_equal, done, params)
    done = eoi.approximate_isometry(params, masks, sigma_w=1.5, steps=3, lr=1e-3)
    np.testing.assert_array_equal(done["b"], dense)
    np.testing.assert_allclose(done["a"], weights, atol=0.05)  # the norm has a kink there


def test_approximate_isometry_of_convolutions_and_stacked_layers():
    rng = np.random.default_rng(0)
    kernel, stack = (
        jnp.asarray(rng.normal(size=s), jnp.float32) / 5 for s in ((3, 3, 4, 8), (3, 8, 8))
    )
    kernel_mask, stack_mask = (jnp.asarray(rng.random(x.shape) < 0.4) for x in (kernel, stack))

    def layout_of(path, leaf):
        return eoi.Layout(batch_axis=0) if path == "stack" else eoi.channels_last(path, leaf)

    params, masks = {"kernel": kernel, "stack": stack}, {"kernel": kernel_mask, "stack": stack_mask}
    done = eoi.approximate_isometry(params, masks, steps=100, lr=0.02, layout_of=layout_of)
    alone = eoi.approximate_isometry({"w": stack[1]}, {"w": stack_mask[1]}, steps=100, lr=0.02)
    np.testing.assert_allclose(done["stack"][1], alone["w"], atol=1e-4)

    def error(kernel):
        matrix = np.where(kernel_mask, kernel, 0).reshape(36, 8)
        return np.linalg.norm(matrix.T @ matrix - np.eye(8))

    assert error(done["kernel"]) < 0.5 * error(kernel)


def test_a_weight_without_any_position_has_no_nan():
    params, masks = {"w": jnp.zeros((4, 4))}, {"w": jnp.zeros((4, 4), bool)}
    done = eoi.approximate_isometry(params, masks, steps=2)
    np.testing.assert_array_equal(done["w"], 0)


# ---------------------------------------------------------------------------------------- spectra


@pytest.mark.parametrize(("n_in", "n_out"), [(6, 4), (4, 6)])
def test_jacobian_spectrum_of_a_linear_map(n_in, n_out):
    matrix = jax.random.normal(KEY, (n_in, n_out))
    spectrum = eoi.jacobian_spectrum(lambda w, x: jnp.tanh(x) @ w, matrix, jnp.zeros((3, n_in)))
    assert spectrum.shape == (3, 4)
    expected = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    np.testing.assert_allclose(spectrum, np.tile(expected, (3, 1)), rtol=1e-5)


def test_jacobian_spectrum_is_that_of_each_input():
    inputs = jnp.array([[[0.0, 1.0]], [[2.0, 3.0]]])  # not a vector
    spectrum = eoi.jacobian_spectrum(lambda w, x: w * x**2, jnp.float32(1.5), inputs)
    np.testing.assert_allclose(spectrum, 3 * np.array([[1.0, 0.0], [3.0, 2.0]]), rtol=1e-6)


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eoi.masked_orthogonal_with_mask(1.1)(KEY, (4, 4)), r"density is 1.1.*\[0, 1\]"),
        (lambda: eoi.masked_orthogonal_with_mask(-0.1)(KEY, (4, 4)), "density is -0.1"),
        (lambda: eoi.masked_orthogonal_with_mask(math.nan)(KEY, (4, 4)), "density is nan"),
        (lambda: eoi.masked_orthogonal_with_mask(0.5)(KEY, (4,)), "at least two axes"),
        (lambda: eoi.masked_orthogonal_with_mask(0.5)(KEY, (4, 4), jnp.int32), "int32"),
        (lambda: eoi.masked_orthogonal_with_mask(0.5, kernel="d"), "kernel is 'd', expected"),
        (lambda: eoi.sao_with_mask(0.3)(KEY, (8, 8)), r"no whole degree.*multiple of 1/8"),
        (lambda: eoi.sao_with_mask(0.0)(KEY, (8, 8)), "no whole degree"),
        (lambda: eoi.sao_with_mask(0.3)(KEY, (10, 10)), "choose a degree that divides"),
        (lambda: eoi.sao_with_mask(0.5)(KEY, (3, 3, 8, 8)), "SAO is for matrices"),
        (lambda: eoi.sao_with_mask(0.5, relu=True)(KEY, (8, 7)), "even sizes"),
    ],
)
def test_bad_baselines(call, message):
    with pytest.raises(ValueError, match=message):
        call()
