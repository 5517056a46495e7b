"""SNIP, GraSP and SynFlow: reference masks, definitions, degenerate networks."""

import functools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.sparsity import pruning
from icmljax.sparsity.masks import apply_masks, densities_of, report

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "eoi" / "prune_at_init_masks.npz"
DENSITY = 0.2


@pytest.fixture
def golden():
    """Network, data and masks; in float64."""
    with np.load(GOLDEN) as file, jax.enable_x64(True):
        arrays = {key: file[key] for key in file.files}
        params = [{"w": jnp.asarray(arrays[f"w{i}"]), "b": jnp.asarray(arrays[f"b{i}"])}
                  for i in range(3)]  # fmt: skip
        yield arrays, params, (jnp.asarray(arrays["x"]), jnp.asarray(arrays["y"]))


def apply_fn(params, x):
    """Layers with weights (out, in); the last output is a log-softmax."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"].T + layer["b"])
    return jax.nn.log_softmax(x @ params[-1]["w"].T + params[-1]["b"])


def nll(params, batch):
    x, y = batch
    return -jnp.mean(jnp.take_along_axis(apply_fn(params, x), y[:, None], axis=1))


def prune(method, params, batch, density=DENSITY, **options):
    if method == "snip":
        return pruning.snip(nll, params, batch, density, **options)
    if method == "grasp":
        return pruning.grasp(apply_fn, params, [batch], density, **options)
    return pruning.synflow(apply_fn, params, batch[0][:1], density, **options)


METHODS = ("snip", "grasp", "synflow")
EACH = pytest.mark.parametrize("method", METHODS)


@EACH
def test_masks_equal_the_reference(method, golden):
    arrays, params, batch = golden
    masks = prune(method, params, batch)
    for i, layer in enumerate(masks):
        np.testing.assert_array_equal(layer["w"], arrays[f"{method}_mask{i}"].astype(bool))
        assert layer["b"].shape == () and layer["b"]


def test_scores_by_their_definitions(golden):
    """SNIP by the plain gradient, GraSP by differences of the gradient along itself."""
    _, params, batch = golden
    flat, unravel = jax.flatten_util.ravel_pytree([layer["w"] for layer in params])

    def rebuilt(flat):
        return [{"w": w, "b": layer["b"]} for w, layer in zip(unravel(flat), params, strict=True)]

    def cooled(flat):  # log-softmax twice, with the temperature between
        logits = apply_fn(rebuilt(flat), batch[0]) / 200.0
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], axis=1))

    def vector(scores):
        assert all(layer["b"] is None for layer in scores)
        return jax.flatten_util.ravel_pytree([layer["w"] for layer in scores])[0]

    snip = vector(pruning.snip_scores(nll, params, batch))
    gradient = jax.grad(lambda flat: nll(rebuilt(flat), batch))(flat)
    np.testing.assert_allclose(snip, jnp.abs(flat * gradient), rtol=1e-10, atol=1e-15)
    grasp = vector(pruning.grasp_scores(apply_fn, params, [batch]))
    slope = jax.jit(jax.grad(cooled))
    step = 1e-3 * slope(flat) / jnp.linalg.norm(slope(flat))  # central difference along g
    change = (slope(flat + step) - slope(flat - step)) / (2 * jnp.linalg.norm(step))
    expected = -flat * change * jnp.linalg.norm(slope(flat))
    np.testing.assert_allclose(grasp, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_grasp_adds_batches_up_and_reads_iterators(golden):
    """Two batches: the Hessian of the sum times the gradient of the sum."""
    _, params, (x, y) = golden
    halves = [(x[:20], y[:20]), (x[20:], y[20:])]
    whole = pruning.grasp_scores(apply_fn, params, [(x, y)])
    for batches in (halves, iter(halves)):
        found = pruning.grasp_scores(apply_fn, params, batches)
        for layer, expected in zip(found, whole, strict=True):  # means of halves: sums are twice
            np.testing.assert_allclose(layer["w"], 4 * expected["w"], rtol=1e-9, atol=1e-18)


def test_synflow_of_a_linear_network_conserves_flow():
    """Without biases the scores of every layer add up to R."""
    params = [jax.random.normal(jax.random.key(i), (4, 4)) for i in range(3)]

    def linear(params, x):
        return functools.reduce(jnp.matmul, params, x)

    scores = pruning.synflow_scores(linear, params, jax.ShapeDtypeStruct((1, 4), jnp.float32))
    flow = linear([jnp.abs(p) for p in params], jnp.ones((1, 4))).sum()
    np.testing.assert_allclose([s.sum() for s in scores], [flow] * 3, rtol=1e-5)
    # In rounds no layer is cut off, where one round at the same density cuts off two.
    inputs = jax.ShapeDtypeStruct((1, 20), jnp.float32)
    uneven = [jax.random.normal(jax.random.key(9 + i), s)
              for i, s in enumerate([(20, 200), (200, 20), (20, 2)])]  # fmt: skip
    once, often = (
        pruning.synflow(linear, uneven, inputs, 0.01, rounds=rounds) for rounds in (1, 100)
    )
    assert linear(apply_masks([jnp.abs(p) for p in uneven], often), jnp.ones((1, 20))).sum() > 0
    assert sum(m.sum() for m in once) == sum(m.sum() for m in often) == 81


def test_synflow_never_takes_a_weight_back():
    """Three paths of two weights. Of 6, 5, 4, 3, 3, 3 weights the third is one whose path is cut:
    its score is 0, as that of the first path's, which went before and has smaller indices.
    """
    params = {"first": jnp.array([0.1, 0.5, 2.0]), "second": jnp.ones(3)}
    masks = pruning.synflow(
        lambda p, x: x @ (p["first"] * p["second"]), params, jnp.ones((1, 3)), 0.4, rounds=10,
        filter_fn=lambda path, leaf: True,
    )  # fmt: skip
    np.testing.assert_array_equal(masks["first"], [False, True, True])
    np.testing.assert_array_equal(masks["second"], [False, False, True])


@EACH
@pytest.mark.parametrize("density", [1 / 3, 1.0])
def test_count_is_exact_and_the_biases_dense(method, density, golden):
    _, params, batch = golden
    masks = prune(method, params, batch, density, **({"rounds": 5} if method == "synflow" else {}))
    kept = {"snip": int(density * 512)}.get(method, 512 - int((1 - density) * 512))
    assert sum(int(layer["w"].sum()) for layer in masks) == kept


@EACH
def test_dead_weights(method):
    """Most gradients are 0: the count stays exact, and the few that are not 0 come first."""
    params = [
        {"w": jnp.ones((8, 4)).at[1:].set(0), "b": jnp.zeros(8)},
        {"w": jnp.zeros((2, 8)).at[:, 0].set(jnp.array([1.0, 0.5])), "b": jnp.zeros(2)},
    ]
    batch = (jnp.ones((3, 4)) * jnp.arange(1.0, 5.0), jnp.array([0, 1, 1]))
    masks = prune(method, params, batch, 0.5)
    assert sum(int(layer["w"].sum()) for layer in masks) == 24
    if method != "grasp":  # there scores have signs
        assert masks[0]["w"][0].all() and masks[1]["w"][:, 0].all()


def test_a_layer_may_be_lost_and_the_report_shows_it(golden):
    _, params, batch = golden
    params = [*params[:2], {"w": 1e-9 * params[2]["w"], "b": params[2]["b"]}]
    masks = pruning.synflow(apply_fn, params, batch[0][:1], 0.2, rounds=1,
                            filter_fn=lambda path, leaf: path.endswith("w"))  # fmt: skip
    assert densities_of(params, masks)[2]["w"] == report(params, masks)[5].density


def test_stacked_layers_and_a_filter():
    """Biases of stacked layers are matrices and stay dense all the same."""
    params = {
        "hidden": {"kernel": 0.5 * jax.random.normal(jax.random.key(0), (3, 6, 6)),
                   "bias": jnp.zeros((3, 6))},
        "out": {"kernel": jax.random.normal(jax.random.key(1), (6, 2))},
    }  # fmt: skip

    def apply(params, x):
        def layer(x, p):
            return jnp.tanh(x @ p["kernel"] + p["bias"]), None

        return jax.lax.scan(layer, x, params["hidden"])[0] @ params["out"]["kernel"]

    def stacked(path, leaf):
        return 1 if path.startswith("hidden") else 0

    batch = (jax.random.normal(jax.random.key(2), (5, 6)), jnp.array([0, 1, 1, 0, 1]))
    inputs = jax.ShapeDtypeStruct((1, 6), jnp.float32)
    options = dict(stacked=stacked)
    chosen = dict(filter_fn=lambda path, leaf: path == "hidden/kernel")
    for masks in (
        pruning.snip(lambda p, b: jnp.mean(apply(p, b[0]) ** 2), params, batch, 0.5, **options),
        pruning.synflow(apply, params, inputs, 0.5, rounds=2, **options),
    ):
        assert masks["hidden"]["bias"].shape == ()
        assert masks["hidden"]["kernel"].sum() + masks["out"]["kernel"].sum() == 60
    masks = pruning.synflow(apply, params, inputs, 0.5, rounds=2, **chosen)
    assert masks["out"]["kernel"].shape == () and masks["hidden"]["kernel"].sum() == 54


def test_equinox_modules():
    model = eqx.nn.MLP(4, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def apply(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x)

    batch = (jax.random.normal(jax.random.key(1), (5, 4)), jnp.array([0, 1, 1, 0, 1]))
    masks = pruning.grasp(apply, arrays, [batch], 0.5)
    assert jax.tree.structure(masks) == jax.tree.structure(arrays)
    assert sum(int(layer.weight.sum()) for layer in masks.layers) == 24


@pytest.mark.bad_input
@EACH
def test_bad_density_and_empty_selection(method):
    params = [{"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}]
    batch = (jnp.ones((1, 3)), jnp.array([0]))
    for density in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="expected a number in"):
            prune(method, params, batch, density)
    with pytest.raises(ValueError, match="selects no leaf"):
        prune(method, params, batch, filter_fn=lambda path, leaf: False)


@pytest.mark.bad_input
@EACH
def test_scores_that_are_not_finite(method):
    params = [{"w": jnp.full((3, 3), 1e30), "b": jnp.zeros(3)}] * 2

    def overflowing(params, x):
        for layer in params:
            x = x @ layer["w"]
        return x

    batch = (jnp.ones((1, 3)), jnp.array([0]))
    functions = {
        "snip": lambda: pruning.snip(
            lambda p, b: overflowing(p, b[0]).sum(), params, batch, DENSITY
        ),
        "grasp": lambda: pruning.grasp(overflowing, params, [batch], DENSITY),
        "synflow": lambda: pruning.synflow(overflowing, params, batch[0], DENSITY, rounds=2),
    }
    with pytest.raises(ValueError, match="gives scores that are not finite"):
        functions[method]()


@pytest.mark.bad_input
def test_no_batches_and_no_rounds():
    params = [{"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}]
    with pytest.raises(ValueError, match="batches is empty"):
        pruning.grasp(apply_fn, params, [], DENSITY)
    with pytest.raises(ValueError, match="rounds is 0"):
        pruning.synflow(apply_fn, params, jnp.ones((1, 3)), DENSITY, rounds=0)
