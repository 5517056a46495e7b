"""Layers: orthogonality, densities, masks, axes, dtypes, convolutions, transforms, meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.initializers import eoi
from icmljax.initializers.eoi import initializers
from icmljax.sparsity import masks
from icmljax.training.mesh import make_mesh
from tests.initializers.common import fits, golden, keys, orthogonality_error

KEY = jax.random.key(0)


def assert_layer(weights, mask, density, scale=1.0, tolerance=2e-6):
    """A matrix, its mask, what was asked for."""
    weights, mask = np.asarray(weights), np.asarray(mask)
    assert orthogonality_error(weights, scale) <= tolerance
    np.testing.assert_array_equal(weights != 0, mask)
    assert abs(mask.mean() - density) <= 0.5 / max(weights.shape) + 1e-12


# ------------------------------------------------------------------------- matrices

# (rows, cols) and how many densities and keys: a shape is compiled once.
SHAPES = [(1, 1, 1), (1, 7, 4), (7, 1, 4), (24, 60, 60), (60, 24, 60)]


@pytest.mark.parametrize(("n_in", "n_out", "draws"), SHAPES)
def test_orthogonal_at_any_density(n_in, n_out, draws):
    rng = np.random.default_rng(n_in + 100 * n_out)
    smallest = eoi.smallest_density((n_in, n_out))
    assert smallest == 1 / max(n_in, n_out)
    # Uniform in the logarithm, both ends included.
    densities = smallest ** rng.uniform(size=draws)
    densities[:2] = [1.0, smallest][:draws]
    for key, density in zip(keys(1, draws), densities, strict=True):
        init = eoi.orthogonal_with_mask(float(density), 1.3)
        weights, mask = init(key, (n_in, n_out))
        assert weights.dtype == jnp.float32 and mask.dtype == bool
        assert_layer(weights, mask, density, 1.3)
        if density == smallest:
            np.testing.assert_array_equal(weights != 0, np.eye(n_in, n_out, dtype=bool))


def test_singular_values_are_the_scale():
    weights = eoi.orthogonal(0.3, 1.7)(KEY, (24, 60))
    np.testing.assert_allclose(np.linalg.svd(weights, compute_uv=False), 1.7, rtol=2e-6)


def test_orthogonal_when_large():
    shape, density = (2048, 2048), 0.02
    weights, mask = eoi.orthogonal_with_mask(density)(KEY, shape)
    weights = scipy.sparse.csr_array(np.asarray(weights, np.float64))
    gram = (weights @ weights.T).toarray()
    assert np.abs(gram - np.eye(shape[0])).max() <= 2e-6
    assert weights.nnz == mask.sum()
    assert abs(weights.nnz / math.prod(shape) - density) <= 0.5 / max(shape)


def test_a_linear_net_of_orthogonal_layers_is_isometric():
    densities = np.geomspace(1 / 32, 1, 20)
    with jax.enable_x64(True):
        init = eoi.orthogonal_with_mask(densities, 1.03, batch_axis=0, dtype=jnp.float64)
        layers, own_masks = init(KEY, (20, 32, 32))
        assert layers.dtype == jnp.float64
        spectrum = eoi.jacobian_spectrum(
            lambda w, x: functools.reduce(jnp.matmul, w, x), list(layers), jnp.ones((2, 32))
        )
    np.testing.assert_allclose(spectrum, 1.03**20, rtol=0, atol=1e-10)
    for layer, mask, density in zip(layers, own_masks, densities, strict=True):
        assert_layer(layer, mask, density, 1.03, tolerance=1e-13)


# -------------------------------------------------------------------- keys, batches, transforms


def test_same_key_same_weights_with_and_without_mask():
    for with_mask, without in (
        (eoi.orthogonal_with_mask, eoi.orthogonal),
        (eoi.delta_orthogonal_with_mask, eoi.delta_orthogonal),
    ):
        weights, mask = with_mask(0.3, 2.0)(KEY, (24, 60))
        np.testing.assert_array_equal(without(0.3, 2.0)(KEY, (24, 60)), weights)
        np.testing.assert_array_equal(with_mask(0.3, 2.0)(KEY, (24, 60))[1], mask)
        assert without.__name__ == with_mask.__name__.removesuffix("_with_mask")
    other = eoi.orthogonal(0.3, 2.0)(jax.random.key(1), (24, 60))
    assert (np.asarray(other) != np.asarray(weights)).any()


def test_jit_and_vmap_are_a_loop_of_calls():
    init = eoi.orthogonal_with_mask(0.3)
    some = keys(2, 3)
    together = jax.jit(jax.vmap(lambda key: init(key, (24, 60))))(some)
    alone = [init(key, (24, 60)) for key in some]
    for index in range(2):
        np.testing.assert_array_equal(together[index], np.stack([x[index] for x in alone]))


def test_stacked_layers_are_independent_and_have_densities_of_their_own():
    densities = np.array([[0.1, 0.9, 0.5], [0.3, 0.2, 1.0]])
    init = eoi.orthogonal_with_mask(densities, batch_axis=(0, 1))
    weights, mask = init(KEY, (2, 3, 24, 60))
    for index in np.ndindex(2, 3):
        assert_layer(weights[index], mask[index], densities[index])
    # Elsewhere among the axes, with one density for all.
    weights, mask = eoi.orthogonal_with_mask(0.3, in_axis=2, out_axis=0, batch_axis=1)(
        KEY, (60, 6, 24)
    )
    layers = np.asarray(weights).transpose(1, 2, 0)
    for layer, own in zip(layers, np.asarray(mask).transpose(1, 2, 0), strict=True):
        assert_layer(layer, own, 0.3)
    for i in range(6):
        for j in range(i):
            assert (layers[i] != layers[j]).mean() > 0.1


def test_initializer_has_a_default_dtype_and_takes_keywords():
    init = eoi.orthogonal(0.5, dtype=jnp.bfloat16)
    weights = init(KEY, (24, 60))
    assert weights.dtype == jnp.bfloat16
    again = init(key=KEY, shape=(24, 60), dtype=jnp.float32)
    np.testing.assert_array_equal(again.astype(jnp.bfloat16), weights)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_weights_are_rounded_once(dtype):
    wide, mask = eoi.orthogonal_with_mask(0.5, 1.1)(KEY, (24, 60))
    weights, narrow_mask = eoi.orthogonal_with_mask(0.5, 1.1)(KEY, (24, 60), dtype)
    assert weights.dtype == dtype
    np.testing.assert_array_equal(weights, wide.astype(dtype))
    np.testing.assert_array_equal(mask, narrow_mask)
    assert 1e-4 < orthogonality_error(weights.astype(jnp.float32), 1.1) < 2e-2


def test_on_a_mesh_the_weights_are_the_same():
    mesh = make_mesh("data=4,model=2")
    init = eoi.orthogonal_with_mask(0.3)
    shardings = NamedSharding(mesh, P("data", "model"))
    weights, mask = jax.jit(lambda key: init(key, (24, 60)), out_shardings=(shardings, shardings))(
        KEY
    )
    assert weights.sharding == shardings
    alone = init(KEY, (24, 60))
    np.testing.assert_array_equal(weights, alone[0])
    np.testing.assert_array_equal(mask, alone[1])


def test_choices_are_those_of_the_plan():
    init = eoi.orthogonal_with_mask(0.4, scheme="matching", target="exact", angle_range=(0.0, 1e-3))
    weights, mask = init(KEY, (24, 60))
    assert orthogonality_error(weights) < 2e-6
    assert mask.sum() == 576  # exact
    np.testing.assert_allclose(weights, np.eye(24, 60), atol=2e-2)  # small angles
    assert np.count_nonzero(weights) == 576
    other = eoi.orthogonal_with_mask(0.4)(KEY, (24, 60))[1]
    assert np.asarray(mask).sum(axis=1).std() < 0.6 * np.asarray(other).sum(axis=1).std()


# -------------------------------------------------------------------------------- axes of layers


def test_projection_to_heads():
    weights, mask = eoi.orthogonal_with_mask(0.3, in_axis=0, out_axis=(1, 2))(KEY, (24, 4, 15))
    assert_layer(weights.reshape(24, 60), mask.reshape(24, 60), 0.3)
    np.testing.assert_array_equal(weights.reshape(24, 60), eoi.orthogonal(0.3)(KEY, (24, 60)))
    back, _ = eoi.orthogonal_with_mask(0.3, in_axis=(0, 1), out_axis=2)(KEY, (4, 15, 24))
    assert orthogonality_error(back.reshape(60, 24)) < 2e-6


def test_out_in_is_the_transpose():
    first = eoi.orthogonal(0.3, in_axis=1, out_axis=0)(KEY, (60, 24))
    np.testing.assert_array_equal(first.T, eoi.orthogonal(0.3)(KEY, (24, 60)))


def test_out_in_height_width_is_the_transpose():
    first = eoi.delta_orthogonal_with_mask(0.2, in_axis=1, out_axis=0)(KEY, (16, 8, 3, 5))
    last = eoi.delta_orthogonal_with_mask(0.2)(KEY, (3, 5, 8, 16))
    for a, b in zip(first, last, strict=True):
        np.testing.assert_array_equal(a.transpose(2, 3, 1, 0), b)


# ---------------------------------------------------------------------------------- convolutions


def convolve(images, kernel, padding="zeros", groups=1):
    size = kernel.shape[0] // 2, kernel.shape[1] // 2
    if padding == "circular":
        pad = [(0, 0), (size[0],) * 2, (size[1],) * 2, (0, 0)]
        images, padding = jnp.pad(images, pad, mode="wrap"), "VALID"
    else:
        padding = "SAME"
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_convolution_keeps_norms(padding):
    kernel = eoi.delta_orthogonal(0.2, 1.2)(KEY, (3, 5, 8, 16))
    images = jax.random.normal(jax.random.key(1), (4, 6, 7, 8))
    out = convolve(images, kernel, padding)
    norms = [np.linalg.norm(np.asarray(x).reshape(4, -1), axis=1) for x in (images, out)]
    np.testing.assert_allclose(norms[1], 1.2 * norms[0], rtol=1e-5)


@pytest.mark.parametrize("split", ["more", "less"])
@pytest.mark.parametrize("shape", [(3, 5, 8, 16), (5, 12, 8)])
def test_mask_of_a_convolution(shape, split):
    taps, size = math.prod(shape[:-2]), math.prod(shape)
    cols = max(shape[-2:])
    for density in (eoi.smallest_density(shape), 0.02, 0.1, 0.43, 0.9, 1.0):
        weights, mask = eoi.delta_orthogonal_with_mask(density, split=split)(KEY, shape)
        weights, mask = (np.asarray(x).reshape(taps, *shape[-2:]) for x in (weights, mask))
        assert mask.sum() == round(density * size)
        assert not np.delete(weights, taps // 2, axis=0).any()
        assert not weights[~mask].any()
        centre = weights[taps // 2]
        assert orthogonality_error(centre) < 2e-6
        wanted = max(initializers.centre_density(density, taps, split), 1 / cols)
        assert abs(np.count_nonzero(centre) / centre.size - wanted) <= 0.5 / cols + 1e-12
        if density == 1:
            assert mask.all()


def test_split_of_the_density():
    for density, k, more, less in golden("conv_density_split")["table"]:
        taps = round(k) ** 2
        assert initializers.centre_density(density, taps, "more") == pytest.approx(more, rel=1e-12)
        assert initializers.centre_density(density, taps, "less") == pytest.approx(less, rel=1e-12)


def test_positions_that_start_at_zero_have_gradients():
    weights, mask = eoi.delta_orthogonal_with_mask(0.3)(KEY, (3, 5, 8, 16))
    images = jax.random.normal(jax.random.key(1), (4, 6, 7, 8))
    gradient = jax.grad(lambda w: jnp.sum(jnp.sin(1 + convolve(images, w))))(weights)
    zeros = np.asarray(mask & (weights == 0))
    assert zeros.sum() > 100
    assert (np.abs(np.asarray(gradient))[zeros] > 1e-4).all()


def test_further_positions_are_uniform():
    support = jnp.zeros((5, 6), bool).at[2].set(True)
    drawn = jax.jit(jax.vmap(lambda key: masks.switch_on(key, support, 14)))(keys(3, 3000))
    drawn = np.asarray(drawn)
    assert (drawn.sum(axis=(1, 2)) == 14).all()
    assert drawn[:, 2].all()
    counts = np.delete(drawn.sum(axis=0), 2, axis=0).ravel()
    # 8 of 24 in each draw: the counts of a draw are not independent, they vary less.
    p, draws = 8 / 24, 3000
    statistic = ((counts - draws * p) ** 2).sum() / (draws * p * (1 - p)) * 23 / 24
    assert scipy.stats.chi2.sf(statistic, 23) > 1e-3
    pairs = drawn[:, 0, 0] & drawn[:, 4, 5]
    expected = 8 * 7 / (24 * 23)
    assert abs(pairs.mean() - expected) < 4 * math.sqrt(expected / draws)


def test_further_positions_when_numbers_are_equal(monkeypatch):
    monkeypatch.setattr(
        masks.jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, 7, dtype)
    )
    support = jnp.zeros((5, 6), bool).at[2].set(True)
    for count in (0, 6, 7, 20, 30, 40):
        mask = masks.switch_on(KEY, support, count)
        assert mask.sum() == min(max(count, 6), 30) and mask[2].all()


def test_further_positions_of_a_kernel_are_in_all_taps():
    init = eoi.delta_orthogonal_with_mask(0.3)
    counts = sum(np.asarray(init(key, (3, 5, 8, 16))[1]).sum(axis=(2, 3)) for key in keys(4, 40))
    off_centre = np.delete(counts.ravel(), 7)
    assert fits(off_centre, np.full(14, 1 / 14)) > 1e-3  # conservative: they vary less
    assert counts[1, 2] > 1.2 * off_centre.max()


def test_one_by_one_convolution_is_a_matrix_with_room():
    for density in (0.2, 0.33, 0.8):
        weights, mask = eoi.delta_orthogonal_with_mask(density)(KEY, (1, 1, 24, 60))
        assert orthogonality_error(weights[0, 0]) < 2e-6
        assert (mask | (weights == 0)).all()
        assert abs(int(mask.sum()) - density * 1440) <= 12


def test_groups_have_blocks_of_their_own():
    shape, groups = (3, 3, 6, 32), 4
    weights, mask = eoi.delta_orthogonal_with_mask(0.3, 1.1, feature_group_count=groups)(KEY, shape)
    assert mask.sum() == round(0.3 * math.prod(shape))
    blocks = np.asarray(weights)[1, 1].reshape(6, groups, 8).swapaxes(0, 1)
    assert orthogonality_error(blocks, 1.1) < 2e-6
    assert (blocks[0] != blocks[1]).any()
    images = jax.random.normal(jax.random.key(1), (2, 5, 5, 24))
    out = convolve(images, weights, groups=groups)
    np.testing.assert_allclose(
        jnp.linalg.norm(out, axis=-1), 1.1 * jnp.linalg.norm(images, axis=-1), rtol=1e-5
    )


def test_depthwise_convolution_is_a_sign():
    weights, mask = eoi.delta_orthogonal_with_mask(0.4, 1.1, feature_group_count=200)(
        KEY, (3, 3, 1, 200)
    )
    signs = np.asarray(weights)[1, 1, 0] / np.float32(1.1)
    np.testing.assert_array_equal(np.abs(signs), 1)
    assert abs(signs.sum()) < 4 * math.sqrt(200)
    assert np.count_nonzero(weights) == 200
    assert mask.sum() == round(0.4 * 1800)


def test_delta_orthogonal_of_a_matrix_is_orthogonal():
    a = eoi.delta_orthogonal_with_mask(0.3, split="more")(KEY, (24, 60))
    b = eoi.orthogonal_with_mask(0.3)(KEY, (24, 60))
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ------------------------------------------------------------------------------------- bad input


def call(shape, density=0.5, dtype=jnp.float32, factory=eoi.orthogonal_with_mask, **choices):
    return factory(density, **choices)(KEY, shape, dtype)


DELTA = eoi.delta_orthogonal_with_mask


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("shape", "choices", "message"),
    [
        ((8,), {}, r"\(8,\).* expected at least two axes"),
        ((), {}, "expected at least two axes"),
        ((8, 0), {}, r"\(8, 0\).*no empty one"),
        ((8, 4), {"density": 0.1}, r"density 0.1 .*\(8, 4\).*\[0.125, 1\]"),
        ((8, 4), {"density": math.nan}, "density nan"),
        ((8, 4), {"density": 1.001}, "density 1.001"),
        ((8, 4), {"density": -0.5}, "density -0.5"),
        ((8, 4), {"dtype": jnp.int32}, "dtype is int32, expected a floating-point type"),
        ((8, 4), {"dtype": jnp.complex64}, "dtype is complex64"),
        ((8, 4), {"in_axis": 2}, r"expected axes in \[-2, 2\)"),
        ((8, 4), {"in_axis": 0, "out_axis": 0}, "every axis at most once"),
        ((8, 4), {"in_axis": ()}, "an in and an out axis"),
        ((3, 3, 8, 4), {}, "neither in, out nor batch.*delta_orthogonal"),
        ((5, 8, 4), {"batch_axis": 0, "density": np.full(4, 0.5)}, r"shape \(4,\).*\(5,\)"),
        ((8, 4), {"density": np.full(4, 0.5)}, r"shape \(4,\).*\(\)"),
        ((5, 8, 4), {"batch_axis": 0, "density": np.array([0.5] * 4 + [0.1])}, r"\[0.125, 1\]"),
        ((8, 4), {"scheme": "other"}, "scheme is 'other'"),
        ((8, 4), {"target": "other"}, "target is 'other'"),
        ((8, 4), {"angle_range": (2.0, 1.0)}, "angle_range"),
        ((2, 2, 8, 4), {"factory": DELTA}, "even size has no centre tap"),
        ((3, 4, 8, 4), {"factory": DELTA}, "even size has no centre tap"),
        ((3, 3, 8, 4), {"factory": DELTA, "density": 0.01}, r"density 0.01 .*\[0.0138889, 1\]"),
        ((3, 3, 8, 4), {"factory": DELTA, "feature_group_count": 3}, "groups that divides the 4"),
        ((3, 3, 8, 4), {"factory": DELTA, "feature_group_count": 0}, "groups"),
        ((3, 3, 8, 4), {"factory": DELTA, "split": "most"}, "split is 'most', expected 'more' or"),
        ((2**15, 2**15), {}, "too large"),
    ],
)  # fmt: skip
def test_bad_layers(shape, choices, message):
    with pytest.raises(ValueError, match=message):
        call(shape, **choices)


@pytest.mark.bad_input
def test_smallest_density_reads_the_shape():
    assert eoi.smallest_density((3, 3, 8, 4)) == 1 / 72
    assert eoi.smallest_density((3, 3, 1, 40), eoi.Layout(feature_group_count=40)) == 1 / 9
    with pytest.raises(ValueError, match="at least two axes"):
        eoi.smallest_density((3,))


def test_random_taps_shift_each_channel():
    init = eoi.delta_orthogonal_with_mask(0.2, tap="random", feature_group_count=40)
    weights, mask = init(jax.random.key(0), (3, 3, 1, 40))
    kernel = np.asarray(weights).reshape(9, 40)
    assert (np.abs(kernel).sum(axis=0) == 1).all() and (np.abs(kernel).max(axis=0) == 1).all()
    assert len(np.unique(np.argmax(np.abs(kernel), axis=0))) > 5
    assert np.asarray(mask)[np.asarray(weights) != 0].all() and mask.sum() == 72
