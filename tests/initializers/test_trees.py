"""Whole networks: what is drawn and what stays, densities that can be had, reports, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.initializers import eoi
from tests.initializers.common import orthogonality_error

KEY = jax.random.key(0)


def network():
    """A convolution, a norm, stacked layers, an output; parameters that cannot be mistaken."""
    return {
        "conv": {"kernel": jnp.full((3, 5, 8, 16), 5.0), "bias": jnp.full(16, 5.0)},
        "norm": {"scale": jnp.full(8, 5.0), "bias": jnp.full(8, 5.0)},
        "stack": {"kernel": jnp.full((6, 24, 60), 5.0), "bias": jnp.full((6, 60), 5.0)},
        "out": {"kernel": jnp.full((16, 10), 5.0, jnp.bfloat16), "b": jnp.full(10, 5.0)},
        "step": jnp.array(5),
    }


STACKED = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
DENSITIES = {
    "conv": {"kernel": 0.1, "bias": None},
    "norm": {"scale": None, "bias": None},
    "stack": {"kernel": STACKED, "bias": None},
    "out": {"kernel": None, "b": None},
    "step": None,
}


def layout_of(path, leaf):
    return eoi.Layout(batch_axis=0) if path == "stack/kernel" else eoi.channels_last(path, leaf)


def test_weights_and_biases_are_drawn_and_nothing_else():
    params, masks = eoi.reinit_tree(KEY, network(), DENSITIES, 1.2, 0.1, layout_of=layout_of)
    assert jax.tree.structure(params) == jax.tree.structure(masks)
    assert jax.tree.structure(params) == jax.tree.structure(network())
    jax.tree.map(
        lambda new, old: (new.shape, new.dtype) == (old.shape, old.dtype) or pytest.fail("form"),
        params,
        network(),
    )
    # Drawn weights.
    assert orthogonality_error(params["conv"]["kernel"][1, 2], 1.2) < 2e-6
    assert masks["conv"]["kernel"].sum() == 192
    assert orthogonality_error(params["stack"]["kernel"], 1.2) < 2e-6
    realised = np.asarray(masks["stack"]["kernel"]).mean(axis=(1, 2))
    np.testing.assert_allclose(realised, STACKED, atol=1 / 120 + 1e-9)
    # What stays: weights without a density, the norm's scale, the counter.
    for a, b in (("out", "kernel"), ("norm", "scale")):
        np.testing.assert_array_equal(params[a][b].astype(jnp.float32), 5)
    assert params["step"] == 5
    # Biases, of any name they go by, each drawn anew.
    biases = [params[x][y] for x, y in
              (("conv", "bias"), ("norm", "bias"), ("stack", "bias"), ("out", "b"))]  # fmt: skip
    flat = np.concatenate([np.ravel(x) for x in biases])
    assert 0.05 < flat.std() < 0.15 and len(np.unique(flat)) == len(flat)
    for mask, drawn in zip(
        jax.tree.leaves(masks), jax.tree.leaves(DENSITIES, is_leaf=lambda x: x is None), strict=True
    ):
        assert mask.dtype == bool
        assert drawn is not None or (mask.ndim == 0 and mask)


def test_biases_are_zero_by_default():
    params, _ = eoi.reinit_tree(KEY, network(), DENSITIES, layout_of=layout_of)
    assert not params["conv"]["bias"].any() and not params["stack"]["bias"].any()
    assert orthogonality_error(params["stack"]["kernel"]) < 2e-6


def test_reinit_is_the_initializer_and_depends_on_the_key():
    params = {"a": jnp.zeros((24, 60)), "b": jnp.zeros((24, 60))}
    densities = {"a": 0.4, "b": 0.4}
    one, masks = eoi.reinit_tree(KEY, params, densities)
    again, _ = eoi.reinit_tree(KEY, params, densities)
    other, _ = eoi.reinit_tree(jax.random.key(1), params, densities)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert (one["a"] != one["b"]).any()
    assert (one["a"] != other["a"]).any()
    np.testing.assert_array_equal(one["a"] != 0, masks["a"])
    densities["b"] = None
    jitted, jitted_masks = jax.jit(lambda key: eoi.reinit_tree(key, params, densities))(KEY)
    np.testing.assert_array_equal(jitted["a"], one["a"])
    np.testing.assert_array_equal(jitted_masks["a"], masks["a"])


def test_other_factories_and_options():
    _, masks = eoi.reinit_tree(
        KEY, {"w": jnp.zeros((3, 5, 8, 16))}, {"w": 0.5},
        factory=functools.partial(eoi.delta_orthogonal_with_mask, split="less"),
    )  # fmt: skip
    assert masks["w"].sum() == 960

    def factory(density, scale, **layout):
        def init(key, shape, dtype):
            assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            seen.append((density, scale, eoi.Layout(**layout), shape, dtype))
            return jnp.zeros(shape, dtype), jnp.ones(shape, bool)

        return init

    seen = []
    drawn, _ = eoi.reinit_tree(
        KEY, {"w": jnp.ones((4, 8), jnp.bfloat16)}, {"w": 0.01}, 1.5,
        factory=factory, layout_of=eoi.channels_first,
    )  # fmt: skip
    layout = eoi.Layout(in_axis=1, out_axis=0)
    assert seen == [(0.01, 1.5, layout, (4, 8), jnp.bfloat16)]
    assert not drawn["w"].any()


def test_trees_of_tuples_and_of_nothing():
    params, masks = eoi.reinit_tree(KEY, ((jnp.zeros((24, 60)), None), []), ((0.5, None), []))
    assert orthogonality_error(params[0][0]) < 2e-6
    assert params[0][1] is None and masks[0][1] is None and params[1] == []
    assert eoi.reinit_tree(KEY, {}, {}) == ({}, {})


# ----------------------------------------------------------------------------- feasible densities


def total(densities, params):
    weights = [
        (np.mean(d), p.size)
        for d, p in zip(
            jax.tree.leaves(densities, is_leaf=lambda x: x is None), jax.tree.leaves(params),
            strict=True,
        )
        if d is not None
    ]  # fmt: skip
    return sum(d * size for d, size in weights)


def test_feasible_densities_keep_the_total():
    params = {
        "a": jnp.zeros((100, 100)),
        "b": jnp.zeros((10, 10)),
        "bias": jnp.zeros(10),
        "c": jnp.zeros((2, 20, 20)),
        "d": jnp.zeros((3, 3, 10, 10)),
    }
    asked = {"a": 0.3, "b": 0.01, "bias": None, "c": np.array([0.049, 0.2]), "d": 0.001}

    def layout_of(path, leaf):
        return eoi.Layout(batch_axis=0) if path == "c" else eoi.channels_last(path, leaf)

    got = eoi.feasible_densities(params, asked, layout_of=layout_of)
    assert total(got, params) == pytest.approx(total(asked, params), rel=1e-12)
    assert got["b"] == 0.1 and got["d"] == 1 / 90 and got["bias"] is None
    assert got["c"].shape == (2,) and got["c"][0] == 0.05
    assert isinstance(got["a"], float)
    assert got["a"] / asked["a"] == pytest.approx(got["c"][1] / asked["c"][1], rel=1e-12)
    assert got["a"] < asked["a"]
    for name, densities in got.items():
        if densities is not None:
            smallest = eoi.smallest_density(params[name].shape, layout_of(name, params[name]))
            assert (np.asarray(densities) >= smallest).all()


def test_feasible_densities_lift_again_what_scaling_takes_below():
    params = {"a": jnp.zeros((10, 10)), "b": jnp.zeros((10, 10)), "c": jnp.zeros((10, 10))}
    got = eoi.feasible_densities(params, {"a": 0.02, "b": 0.105, "c": 0.5})
    assert got["a"] == got["b"] == 0.1
    assert got["c"] == pytest.approx(0.425, rel=1e-12)


def test_feasible_densities_stay():
    params = {"a": jnp.zeros((10, 10)), "b": jnp.zeros(3)}
    assert eoi.feasible_densities(params, {"a": 0.3, "b": None}) == {"a": 0.3, "b": None}
    assert eoi.feasible_densities(params, {"a": None, "b": None}) == {"a": None, "b": None}
    shapes = jax.eval_shape(lambda: params)
    assert eoi.feasible_densities(shapes, {"a": 1.0, "b": None})["a"] == 1.0


def test_feasible_densities_of_tuples():
    params = ((jnp.zeros((10, 10)), jnp.zeros(3)), (jnp.zeros((20, 20)), jnp.zeros(3)))
    got = eoi.feasible_densities(params, ((0.05, None), (0.3, None)))
    assert got[0] == (0.1, None)
    assert got[1][0] == pytest.approx((0.05 * 100 + 0.3 * 400 - 10) / 400, rel=1e-12)


# ------------------------------------------------------------------------------------------ report


def test_report_says_what_came_out():
    params, masks = eoi.reinit_tree(KEY, network(), DENSITIES, 1.2, layout_of=layout_of)
    rows = eoi.report(params, masks, DENSITIES, 1.2, layout_of=layout_of)
    assert [row.path for row in rows] == ["conv/kernel", "stack/kernel"]
    conv, stack = rows
    assert conv.shape == (3, 5, 8, 16) and conv.asked == 0.1
    assert conv.density == pytest.approx(0.1)
    counts = np.asarray(masks["conv"]["kernel"]).sum(axis=(0, 1, 2))
    assert (conv.fewest, conv.most) == (counts.min(), counts.max())
    assert stack.asked == pytest.approx(0.4)
    assert stack.density == pytest.approx(np.asarray(masks["stack"]["kernel"]).mean())
    counts = np.asarray(masks["stack"]["kernel"]).sum(axis=1)
    assert (stack.fewest, stack.most) == (counts.min(), counts.max())
    assert max(conv.error, stack.error) < 2e-6
    # A layer that is none is seen.
    broken = {**params, "stack": {**params["stack"], "kernel": params["stack"]["kernel"] * 1.1}}
    assert eoi.report(broken, masks, DENSITIES, 1.2, layout_of=layout_of)[1].error == pytest.approx(
        0.21, rel=1e-3
    )


# --------------------------------------------------------------------------------------- bad input


def changed(path, value, tree=DENSITIES):
    """A copy with another entry."""
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in tree.items()}
    tree[path[0]][path[1]] = value
    return tree


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("densities", "layouts", "message"),
    [
        (changed(("conv", "kernel"), 0.004), layout_of,
         r"'conv/kernel'.* density 0.004 .*\(3, 5, 8, 16\).*\[0.00416667, 1\]"),
        (changed(("conv", "kernel"), float("nan")), layout_of, "'conv/kernel'.* density nan"),
        (changed(("stack", "kernel"), np.array([0.2, 0.3])), layout_of, r"'stack/kernel'.*\(2,\)"),
        (DENSITIES, eoi.channels_last, r"'stack/kernel' has shape \(6, 24, 60\), expected 2 or 4"),
        (changed(("norm", "scale"), 0.5), layout_of, r"'norm/scale' has shape \(8,\), expected"),
        ({k: v for k, v in DENSITIES.items() if k != "out"}, layout_of, "out"),
        (changed(("conv", "other"), None), layout_of, "conv.*other"),
    ],
)  # fmt: skip
def test_bad_trees(densities, layouts, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        eoi.reinit_tree(KEY, network(), densities, layout_of=layouts)


@pytest.mark.bad_input
@pytest.mark.parametrize("densities", [{"conv": None}, {"conv": 0.5}])
def test_a_density_for_a_whole_branch_names_it(densities):
    with pytest.raises(ValueError, match="conv"):
        eoi.reinit_tree(KEY, network(), {**DENSITIES, **densities}, layout_of=layout_of)


@pytest.mark.bad_input
def test_bad_totals():
    params = {"a": jnp.zeros((10, 10))}
    with pytest.raises(ValueError, match="need 10 of 100 weights at least, .* give 5"):
        eoi.feasible_densities(params, {"a": 0.05})
    with pytest.raises(ValueError, match="b"):
        eoi.feasible_densities(params, {"b": 0.05})


@pytest.mark.bad_input
def test_bad_masks_name_the_parameter():
    params = {"layer": {"kernel": jnp.ones((4, 4))}}
    for masks in (
        {"layer": {"kernel": jnp.ones((3, 4), bool)}},
        {"layer": {"other": jnp.ones(())}},
    ):
        with pytest.raises(ValueError, match="layer/kernel"):
            eoi.approximate_isometry(params, masks, steps=1)


@pytest.mark.bad_input
def test_layouts_of_libraries_expect_two_or_four_axes():
    for layout in (eoi.channels_last, eoi.channels_first):
        with pytest.raises(ValueError, match=r"'a/w' has shape \(3,\), expected 2 or 4 axes"):
            layout("a/w", jnp.zeros(3))
    assert eoi.channels_first("w", jnp.zeros((3, 4))) == eoi.Layout(in_axis=1, out_axis=0)
