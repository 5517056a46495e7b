"""The two passes of MADA: closed forms, Pallas against XLA, lowering for real accelerators."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.kernels import mada_step
from icmljax.kernels.mada_step import MadaHyperparams, Moments, Rule, StepScalars, equations, pallas
from icmljax.training.mesh import make_mesh

try:
    from jax.sharding import AbstractDevice
except ImportError:  # jax 0.10
    from jax._src.mesh import AbstractDevice

NAMES = MadaHyperparams._fields
HYPER = MadaHyperparams(0.8, 0.9, 0.3, 0.4, 0.7, 0.6)
RULES = [
    Rule(),
    Rule("max"),
    Rule("max", max_after_correction=True),
    Rule(diff_bias_correction=True),
    Rule(official=True),
]


def leaf(seed, shape, dtype=np.float32, without=()):
    """Moments, gradient and next gradient of a leaf, with a dead row of elements in it."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name in (*Moments._fields, "g", "next")}
    arrays["v"], arrays["vbar"] = np.abs(arrays["v"]), np.abs(arrays["vbar"])
    for array in arrays.values():
        array[..., :1] *= 0
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    g, following = arrays.pop("g"), arrays.pop("next")
    return Moments(**arrays | dict.fromkeys(without)), g, following


def scalars(t=3, hyper=HYPER, dtype=np.float32, eps=1e-3):
    traced = MadaHyperparams(*(x if isinstance(x, float) else dtype(x) for x in hyper))
    return mada_step.step_scalars(traced, jnp.int32(t), eps, 0.95, 0.98, dtype)


TRACED = MadaHyperparams(*map(np.float32, HYPER))


# ------------------------------------------------------------------------------ closed forms


def reference_direction(h, moments, g, t, rule, eps):
    """A step written once more, from the paper, for jax.jacobian."""
    d = g - moments.gradient
    ghat = g + h.beta3 * d
    square = ghat**2
    yogi = moments.v - jnp.sign(moments.v - square) * square
    m = h.beta1 * moments.m + (1 - h.beta1) * g
    q = h.c * square + (1 - h.c) * yogi
    v = h.beta2 * moments.v + (1 - h.beta2) * q
    n = h.beta3 * moments.n + (1 - h.beta3) * d
    k1, k2, k3 = (1 - beta**t for beta in (h.beta1, h.beta2, h.beta3))
    corrected = rule.max_after_correction
    if rule.second_moment == "avg":
        vbar = ((t - 1) * moments.vbar + v) / t
    else:
        vbar = jnp.maximum(moments.vbar, v / k2 if corrected else v)
    if rule.official:
        vbar = jax.lax.stop_gradient(vbar)
    if corrected:
        vhat = h.rho * v / k2 + (1 - h.rho) * vbar
    else:
        vhat = (h.rho * v + (1 - h.rho) * vbar) / k2
    n = n / k3 if rule.diff_bias_correction else n
    lion = 0.98 * moments.lion + 0.02 * g if rule.official else moments.lion
    sign = jnp.sign(0.95 * lion + 0.05 * g)
    return h.gamma * (m / k1 + h.beta3 * n) / (jnp.sqrt(vhat) + eps) + (1 - h.gamma) * sign


@functools.partial(jax.jit, static_argnums=4)
def _compare(h, moments, g, t, rule):
    f = functools.partial(reference_direction, moments=moments, g=g, t=t, rule=rule, eps=1e-3)
    s = mada_step.step_scalars(h, t, 1e-3, 0.95, 0.98, jnp.float64)
    found = mada_step.direction_gradient(moments, g, s, rule, NAMES)
    after, direction = mada_step.inner_step(moments, g, s, rule)
    return direction, f(h), jnp.stack(found), jnp.stack(jax.jacobian(f)(h)), after


unit = functools.partial(st.floats, allow_nan=False, allow_subnormal=False)


@hypothesis.given(
    hyper=st.tuples(
        unit(0.01, 0.99), unit(0.501, 0.99), unit(0.001, 0.99), unit(0, 1), unit(0, 1), unit(0, 1)
    ),
    t=st.integers(1, 50),
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(RULES),
)
@hypothesis.settings(max_examples=100)
def test_closed_forms_are_the_jacobian_of_the_step(hyper, t, seed, rule):
    with jax.enable_x64(True):
        moments, g, _ = leaf(seed, (7,), np.float64)
        moments, g = jax.tree.map(lambda x: x[1:], (moments, g))  # no dead element: NaN in autodiff
        h = MadaHyperparams(*map(jnp.float64, hyper))
        direction, expected, found, jacobian, _ = _compare(h, moments, g, jnp.int64(t), rule)
        np.testing.assert_allclose(direction, expected, rtol=1e-9, atol=1e-12)
        # 1 - beta1 and 1 - beta2^t cancel by a factor of 100, squared in the derivatives.
        size = 1 + np.abs(jacobian).max()
        np.testing.assert_allclose(found, jacobian, rtol=1e-9, atol=1e-11 * size)


def test_dead_elements_have_no_gradient_and_no_direction():
    moments, g, _ = leaf(0, (4,))
    for rule in RULES:
        for x in mada_step.direction_gradient(moments, g, scalars(1), rule, NAMES):
            assert np.isfinite(x).all() and x[0] == 0
        _, direction = mada_step.inner_step(moments, g, scalars(1), rule)
        assert direction[0] == 0


# ------------------------------------------------------------------------- implementations

SHAPES = [(1,), (7,), (3, 5), (257, 130), (2, 3, 4)]
WORKERS = {
    "tpu": (pallas.tpu_sums, pallas.tpu_lagged),
    "gpu": (pallas.gpu_sums, pallas.gpu_lagged),
}
# Everything traced; a specialised step with fewer buffers; everything learned but beta1.
CASES = [
    (TRACED, (), NAMES),
    (TRACED._replace(gamma=1.0, rho=1.0, beta3=0.0, c=1.0),
     ("vbar", "n", "lion", "gradient"), ("beta1", "beta2")),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", WORKERS)
def test_pallas_sums_are_the_plain_sums(which, shape):
    hyper, without, learned = CASES[SHAPES.index(shape) % 2]
    arguments = leaf(1, shape, without=without)
    s = scalars(hyper=hyper)
    worker = functools.partial(WORKERS[which][0], interpret=True)
    compare = jax.jit(lambda leaf: (worker(s, leaf, Rule(), learned),
                                    equations.products(s, leaf, Rule(), learned)))  # fmt: skip
    found, terms = compare(arguments)
    for x, term in zip(found, terms, strict=True):
        term = np.asarray(term, np.float64)
        # Against float64; the error of a sum is relative to the sum of magnitudes.
        np.testing.assert_allclose(x, term.sum(), rtol=0, atol=1e-6 * np.abs(term).sum() + 1e-12)


@pytest.mark.parametrize("which", WORKERS)
def test_padding_of_a_block_counts_for_nothing(which):
    """Without eps what lies outside the leaf is 0 / 0."""
    arguments = jax.tree.map(lambda x: x[1:], leaf(1, (8,)))
    s = scalars(eps=0.0)
    found = WORKERS[which][0](s, arguments, Rule(), NAMES, interpret=True)
    for x, term in zip(found, equations.products(s, arguments, Rule(), NAMES), strict=True):
        np.testing.assert_allclose(x, term.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, jnp.float32) for shape in SHAPES),
        *((shape, jnp.bfloat16) for shape in SHAPES[2:4]),
    ],
)
@pytest.mark.parametrize("which", WORKERS)
def test_pallas_step_is_the_plain_step(which, shape, dtype):
    hyper, without, _ = CASES[SHAPES.index(shape) % 2]
    moments, g, following = leaf(2, shape, without=without)
    moments, g = jax.tree.map(lambda x: x.astype(dtype), (moments, g))
    arguments = (scalars(3, hyper), scalars(4, hyper), jnp.float32(0))
    worker = functools.partial(WORKERS[which][1], interpret=True)
    found, expected = jax.jit(
        lambda leaf: [f(arguments, leaf, Rule()) for f in (worker, equations.lagged)]
    )((moments, g, following))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # The last bit of float32 may decide the rounding to bfloat16.
    rtol = 1e-5 if dtype == jnp.float32 else 2 * float(jnp.finfo(jnp.bfloat16).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape == shape
        np.testing.assert_allclose(
            np.float32(x), np.float32(y), rtol=rtol, atol=rtol * np.abs(np.float32(y)).max()
        )


@pytest.mark.parametrize("size", [1, 7, 8191, 16383, 16384, 20011, 40000])
def test_blocked_sums_are_exact_sums(size):
    """The CPU path, with and without a last block that overlaps the one before it."""
    arguments = leaf(3, (size,))
    found, terms = jax.jit(
        lambda leaf: (
            mada_step._blocked_sums(scalars(), leaf, Rule(), NAMES),
            equations.products(scalars(), leaf, Rule(), NAMES),
        )
    )(arguments)
    for x, term in zip(found, terms, strict=True):
        term = np.asarray(term, np.float64)
        # One loop over up to 16384 terms rounds at random: 1e-7 times its square root.
        np.testing.assert_allclose(x, term.sum(), rtol=0, atol=1.3e-5 * np.abs(term).max() + 1e-12
                                   + 1e-6 * np.abs(term).sum())  # fmt: skip


def public(implementation=None, **kwargs):
    """Both passes on two leaves, as one function of the leaves."""

    def both(leaves):
        moments, g, following = map(list, zip(*leaves, strict=True))
        sums = mada_step.hyper_gradient_sums(
            moments, g, following, scalars(), Rule(), NAMES, implementation=implementation
        )
        step = mada_step.lagged_step(
            moments, g, following, scalars(3), scalars(4), Rule(), jnp.bool_(False),
            implementation=implementation,
        )  # fmt: skip
        return sums, step

    return both


def test_public_functions_sum_over_leaves_and_skip_empty_ones():
    leaves = [leaf(4, (3, 5)), leaf(5, (0, 2)), leaf(6, (9,))]
    scalar = jax.tree.map(lambda x: x[1], leaf(7, (3,)))
    sums, (after, directions) = jax.jit(public())([*leaves, scalar])
    one = jax.tree.map(lambda *x: jnp.concatenate([y.ravel() for y in x]), *leaves, scalar)
    whole, (whole_after, whole_directions) = jax.jit(public("xla"))([one])
    for x, y in zip(sums, whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert [d.shape for d in directions] == [(3, 5), (0, 2), (9,), ()]
    flat = np.concatenate([d.ravel() for d in directions])
    np.testing.assert_allclose(flat, whole_directions[0], rtol=1e-5, atol=1e-6)
    flat = np.concatenate([a.vbar.ravel() for a in after])
    np.testing.assert_allclose(flat, whole_after[0].vbar, rtol=1e-6)
    assert mada_step.hyper_gradient_sums([], [], [], scalars(), Rule(), NAMES) == [0.0] * 6


def test_first_step_keeps_the_buffers_and_sets_the_previous_gradient():
    moments, g, following = leaf(8, (6,))
    moments, g = moments._replace(gradient=0 * g), 0 * g  # as a state starts
    for rule in (Rule(), Rule(official=True)):
        (after,), _ = mada_step.lagged_step(
            [moments], [g], [following], scalars(1), scalars(1), rule, jnp.bool_(True)
        )
        np.testing.assert_array_equal(after.m, moments.m)
        np.testing.assert_array_equal(after.gradient, 0 * g if rule.official else following)
        np.testing.assert_array_equal(after.n, following**2 if rule.official else moments.n)


# ------------------------------------------------------------------------------- lowering

MARKS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


DEVICES = {"tpu": ("TPU v5 lite", 1), "cuda": ("NVIDIA H100", 132)}


def _mesh(platform, size=1):
    """A mesh of devices that this machine lacks; some lowering rules ask which they are."""
    kind, cores = DEVICES[platform]
    device = AbstractDevice(
        device_kind=kind, num_cores=cores, platform="gpu" if platform == "cuda" else platform
    )
    return AbstractMesh((size,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)


def _lower(function, leaves, platform, mesh=None):
    with jax.sharding.use_abstract_mesh(mesh or _mesh(platform)):
        traced = jax.jit(function).trace(leaves)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("implementation", [None, "pallas"])
@pytest.mark.parametrize("platform", MARKS)
def test_lowers_to_pallas_on_accelerators(platform, implementation):
    leaves = [leaf(0, (257, 130)), leaf(1, (7,)), leaf(2, (2, 3, 4), jnp.bfloat16)]
    text = _lower(public(implementation), leaves, platform)
    assert text.count(MARKS[platform]) >= 2 * len(leaves)  # both passes, each leaf


@pytest.mark.parametrize("platform", MARKS)
def test_xla_contains_no_pallas_call(platform):
    assert MARKS[platform] not in _lower(public("xla"), [leaf(0, (8, 16))], platform)


def test_automatic_choice_on_a_cpu_is_xla():
    text = jax.jit(public()).lower([leaf(0, (8, 16))]).as_text()
    assert "custom_call" not in text


def test_float64_is_left_to_xla():
    with jax.enable_x64(True):
        moments, g, following = leaf(0, (8, 16), np.float64)
        s = scalars(dtype=np.float64)
        text = _lower(
            lambda leaf: mada_step.hyper_gradient_sums(
                [leaf[0]], [leaf[1]], [leaf[2]], s, Rule(), NAMES
            ),
            (moments, g, following),
            "tpu",
        )
    assert MARKS["tpu"] not in text


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_partitioned_leaves_are_left_to_xla(axis_type):
    """The compiler cannot partition a Pallas call."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    leaves = jax.device_put([leaf(0, (16, 128))], NamedSharding(mesh, P("x")))
    traced = jax.jit(public()).trace(leaves)
    assert MARKS["tpu"] not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_shard_map_runs_pallas_on_each_device():
    mesh, spec = _mesh("tpu", 8), P("data")

    def both(leaves):
        sums, step = public()(leaves)
        return jax.lax.psum(sums, "data"), step

    mapped = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(P(), (spec, spec)))
    assert _lower(mapped, [leaf(0, (16, 128))], "tpu", mesh).count(MARKS["tpu"]) == 2


@pytest.mark.parametrize("size", [64, 8 * 20000])
def test_shard_map_checks_what_varies(size):
    """With check_vma, its default, on short leaves and on those that are summed by blocks."""
    mesh = make_mesh("data=8")

    def both(leaves):
        sums, step = public()(leaves)
        return jax.lax.psum(sums, "data"), step

    spec = P("data")
    mapped = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(P(), (spec, spec)))
    leaves = [leaf(0, (size,))]
    found, expected = jax.jit(mapped)(leaves), jax.jit(public())(leaves)
    for x, y in zip(found[0], expected[0], strict=True):
        # Sums of up to 160000 terms, most of order 1, in another order.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * size)
    np.testing.assert_allclose(found[1][1][0], expected[1][1][0], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.bad_input
def test_pallas_on_a_cpu_raises():
    with pytest.raises(NotImplementedError, match="platform"):
        jax.jit(public("pallas"))([leaf(0, (8, 16))])


@pytest.mark.bad_input
def test_pallas_in_float64_raises():
    with jax.enable_x64(True):
        moments, g, following = leaf(0, (3,), np.float64)
        s = scalars(dtype=np.float64)
        with pytest.raises(ValueError, match="Pallas kernels compute in float32, .* float64"):
            mada_step.hyper_gradient_sums(
                [moments], [g], [following], s, Rule(), NAMES, implementation="pallas"
            )


@pytest.mark.bad_input
def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation is 'triton'; expected 'xla', 'pallas'"):
        public("triton")([leaf(0, (3,))])


def test_scalars_of_a_step():
    s = scalars(5)
    assert isinstance(s, StepScalars)
    np.testing.assert_allclose(s.k, [1 - 0.8**5, 1 - 0.9**5, 1 - 0.3**5], rtol=1e-6)
    np.testing.assert_allclose(s.dk, [5 * 0.8**4, 5 * 0.9**4, 5 * 0.3**4], rtol=1e-6)
