"""Levels of rotations: one after another in float64, Pallas against XLA, lowering, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.kernels import givens
from icmljax.kernels.givens import givens_levels
from icmljax.training.mesh import make_mesh

try:
    from jax.sharding import AbstractDevice
except ImportError:  # jax 0.10
    from jax._src.mesh import AbstractDevice


def rotations(seed, levels, n, dtype=np.float32, rest=0.2):
    """Random disjoint pairs in each level; a share of the rows rests, and of an odd n one more."""
    rng = np.random.default_rng(seed)
    partner = np.tile(np.arange(n, dtype=np.int32), (levels, 1))
    cos, sin = np.ones((levels, n), dtype), np.zeros((levels, n), dtype)
    for level in range(levels):
        pairs = int(n * (1 - rest)) // 2
        i, j = rng.permutation(n)[: 2 * pairs].reshape(2, -1)
        angle = rng.uniform(0, 2 * np.pi, pairs).astype(dtype)
        partner[level, i], partner[level, j] = j, i
        cos[level, i] = cos[level, j] = np.cos(angle)
        sin[level, i], sin[level, j] = np.sin(angle), -np.sin(angle)
    return tuple(map(jnp.asarray, (partner, cos, sin)))


def problem(seed, levels, n, m, dtype=np.float32, **kwargs):
    matrix = np.random.default_rng(seed + 1000).normal(size=(n, m)).astype(dtype)
    return *rotations(seed, levels, n, dtype, **kwargs), jnp.asarray(matrix)


def one_after_another(partner, cos, sin, matrix):
    """The same rotations, each in a level of its own."""
    levels, n = partner.shape
    singles = []
    for level in range(levels):
        for i in range(n):
            j = int(partner[level, i])
            if i < j:
                row = np.arange(n, dtype=np.int32), np.ones(n, cos.dtype), np.zeros(n, sin.dtype)
                for here, there in ((i, j), (j, i)):
                    row[0][here] = there
                    row[1][here], row[2][here] = cos[level, here], sin[level, here]
                singles.append(row)
    return *(jnp.stack(x) for x in zip(*singles, strict=True)), matrix


def rows_by_numpy(partner, cos, sin, matrix):
    """The rotations as the paper writes them, each product and each sum rounded."""
    matrix = np.array(matrix)
    for p, c, s in zip(*(np.asarray(x) for x in (partner, cos, sin)), strict=True):
        for i, j in enumerate(p):
            if i < j:
                x, y = matrix[[i, j]]
                matrix[i], matrix[j] = c[i] * x + s[i] * y, c[j] * y + s[j] * x
    return matrix


# ----------------------------------------------------------------------------------- identities


@pytest.mark.parametrize(("levels", "n", "m"), [(4, 7, 5), (1, 2, 1), (3, 1, 4), (2, 20, 300)])
def test_levels_are_rotations_of_pairs(levels, n, m):
    arguments = problem(0, levels, n, m)
    found = givens_levels(*arguments)
    assert found.dtype == jnp.float32 and found.shape == (n, m)
    np.testing.assert_array_equal(found, rows_by_numpy(*arguments))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_levels_equal_one_rotation_after_another_exactly(dtype):
    with jax.enable_x64(True):
        arguments = problem(1, 5, 23, 17, dtype)
        singles = one_after_another(*arguments)
        assert len(singles[0]) == 5 * 9
        found = givens_levels(*arguments)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, givens_levels(*singles))


def test_resting_rows_keep_their_bits():
    partner, cos, sin, matrix = problem(2, 6, 11, 9, rest=0.5)
    partner, cos, sin = (x.at[:, :3].set(y) for x, y in zip(
        (jnp.tile(jnp.arange(11), (6, 1)), jnp.ones_like(cos), jnp.zeros_like(sin)),
        (jnp.arange(3), 1.0, 0.0), strict=True))  # fmt: skip
    matrix = matrix.at[0, 0].set(-0.0)
    found = givens_levels(partner, cos, sin, matrix)
    np.testing.assert_array_equal(found, matrix)
    assert np.signbit(found[0, 0])


def test_rotations_are_orthogonal():
    *turns, _ = problem(3, 12, 40, 1)
    q = np.asarray(givens_levels(*turns, jnp.eye(40)), np.float64)
    np.testing.assert_allclose(q @ q.T, np.eye(40), atol=1e-6)
    assert np.mean(q != 0) > 0.5  # and no identity


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("implementation", [None, "xla", "pallas"])
def test_nothing_to_do(shape, implementation):
    arguments = problem(4, *shape)
    np.testing.assert_array_equal(
        givens_levels(*arguments, implementation=implementation), arguments[-1]
    )


def test_any_split_of_columns_and_levels_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(givens, "_CPU_COLUMNS", 32)
    monkeypatch.setattr(givens, "_CPU_TILE", 0)
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(True):
            partner, cos, sin, matrix = arguments = problem(5, 6, 45, 203, dtype)
            whole = jax.jit(givens.tiled)(*arguments)  # seven tiles, the last of which overlaps
            np.testing.assert_array_equal(whole, jax.jit(givens.reference)(*arguments))
            parts = [givens_levels(partner, cos, sin, matrix[:, at]) for at in
                     (slice(0, 1), slice(1, 60), slice(60, None))]  # fmt: skip
            np.testing.assert_array_equal(whole, jnp.concatenate(parts, axis=1))
            for at in (slice(0, 1), slice(1, 6)):
                matrix = givens_levels(partner[at], cos[at], sin[at], matrix)
            np.testing.assert_array_equal(whole, matrix)


# --------------------------------------------------------------------------------------- Pallas

WORKERS = {"tpu": givens.tpu, "cuda": givens.gpu}


def interpreted(platform, interpret=True):
    return functools.partial(WORKERS[platform], interpret=interpret)


# More than one tile, several blocks of pairs, one row, resting rows only.
SHAPES = [(3, 5, 3), (2, 37, 1100), (3, 300, 20), (2, 1, 3), (2, 2, 130)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("platform", WORKERS)
def test_pallas_rotates_as_the_reference(platform, shape):
    arguments = problem(6, *shape)
    found = jax.jit(interpreted(platform))(*arguments)
    # Rows have norms of about 1, of which each level rounds two products and a sum.
    expected = givens.reference(*arguments)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_a_tile_for_each_height(monkeypatch):
    """Tiles of 4, 2 and 1 rows of 128 columns; and XLA where no such tile fits."""
    arguments = problem(7, 2, 8, 600)
    expected = givens.reference(*arguments)
    for lanes_fit, calls in ((4, 1), (3, 1), (1, 1), (0, 0)):
        monkeypatch.setattr(givens, "_TPU_TILE_BYTES", 8 * 128 * 4 * lanes_fit)
        run = interpreted("tpu")
        assert str(jax.make_jaxpr(run)(*arguments)).count("pallas_call[") == calls
        np.testing.assert_allclose(run(*arguments), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("platform", WORKERS)
def test_gradients_are_those_of_the_reference(platform):
    *turns, matrix = problem(8, 4, 13, 21)
    weights = jnp.cos(jnp.arange(matrix.size, dtype=jnp.float32)).reshape(matrix.shape)

    def loss(run):
        return jax.jit(jax.grad(
            lambda cos, sin, matrix: jnp.sum(weights * run(turns[0], cos, sin, matrix)), (0, 1, 2)
        ))  # fmt: skip

    found = loss(functools.partial(givens.with_gradient, interpreted(platform)))(*turns[1:], matrix)
    public = loss(givens_levels)(*turns[1:], matrix)
    expected = loss(givens.reference)(*turns[1:], matrix)
    xla = loss(functools.partial(givens_levels, implementation="xla"))(*turns[1:], matrix)
    for candidate in (found, public, xla):
        for x, y in zip(candidate, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
            assert np.abs(y).max() > 0.1


def test_xla_has_forward_derivatives():
    *turns, matrix = problem(9, 3, 9, 4)
    run = functools.partial(givens_levels, *turns, implementation="xla")
    _, tangent = jax.jvp(run, (matrix,), (2 * matrix,))  # linear
    np.testing.assert_allclose(tangent, 2 * run(matrix), rtol=1e-6)


# -------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (None, None, None, 0), (0, 0, 0, None)])
def test_vmap_is_a_loop(in_axes):
    problems = [problem(seed, 3, 9, 6) for seed in (0, 1)]
    picked = [
        [p[k] if axis == 0 else problems[0][k] for k, axis in enumerate(in_axes)] for p in problems
    ]
    stacked = [
        jnp.stack([p[k] for p in picked]) if axis == 0 else picked[0][k]
        for k, axis in enumerate(in_axes)
    ]
    found = jax.jit(jax.vmap(givens_levels, in_axes))(*stacked)
    for x, p in zip(found, picked, strict=True):
        np.testing.assert_array_equal(x, givens_levels(*p))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_columns_need_no_communication(axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    *turns, matrix = problem(10, 3, 12, 64)
    run = jax.jit(givens_levels)
    with jax.set_mesh(mesh):
        columns = jax.device_put(matrix, NamedSharding(mesh, P(None, "x")))
        turns = jax.device_put(turns, NamedSharding(mesh, P()))
        found = run(*turns, columns)
        text = run.lower(*turns, columns).compile().as_text()
        tpu = run.trace(*turns, columns).lower(lowering_platforms=("tpu",)).as_text()
    assert found.sharding.spec == P(None, "x")
    np.testing.assert_array_equal(found, run(*map(np.asarray, turns), matrix))
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    assert MARKS["tpu"] not in tpu  # the compiler cannot partition a Pallas call


@pytest.mark.parametrize(
    "specs",
    [
        (P(), P(), P(), P(None, "data")),  # one plan, the columns divided
        (P(None, "data"), P(None, "data"), P(None, "data"), P()),  # a plan each, one matrix
    ],
)
def test_shard_map_with_what_varies(specs):
    mesh = make_mesh("data=8")
    *turns, matrix = problem(11, 3, 12, 16)
    if specs[0] != P():
        turns = [jnp.concatenate([x] * 8, axis=1) for x in turns]
    mapped = jax.shard_map(givens_levels, mesh=mesh, in_specs=specs, out_specs=P(None, "data"))
    expected = givens_levels(*(x[:, :12] for x in turns), matrix)
    found = jax.jit(mapped)(*turns, matrix)
    if specs[0] != P():
        expected = jnp.concatenate([expected] * 8, axis=1)
    np.testing.assert_array_equal(found, expected)
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(mapped(turns[0], *x) ** 2), (0, 1, 2)))
    for x in gradient(*turns[1:], matrix):
        assert np.isfinite(x).all() and np.abs(x).max() > 0


# ----------------------------------------------------------------------------------------- lowering

MARKS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}
DEVICES = {"tpu": ("TPU v5 lite", 1, "tpu"), "cuda": ("NVIDIA H100", 132, "gpu")}


def lowered(function, arguments, platform):
    """For a device that this machine lacks; some lowering rules ask which one it is."""
    kind, cores, name = DEVICES[platform]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=name)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("platform", MARKS)
def test_lowers_to_pallas_on_accelerators(platform, x64):
    with jax.enable_x64(x64):
        arguments = problem(12, 3, 130, 300)
        for implementation in (None, "pallas"):
            run = functools.partial(givens_levels, implementation=implementation)
            assert MARKS[platform] in lowered(run, arguments, platform)
        gradient = jax.grad(lambda x: jnp.sum(givens_levels(*arguments[:3], x)))
        assert MARKS[platform] in lowered(gradient, arguments[3:], platform)


@pytest.mark.parametrize("platform", MARKS)
def test_lowers_to_pallas_under_vmap_and_at_full_size(platform):
    def shapes(*batch, levels=30, n=4096, m=4096):
        turns = [jax.ShapeDtypeStruct((*batch, levels, n), x) for x in ("int32", "f4", "f4")]
        return *turns, jax.ShapeDtypeStruct((*batch, n, m), jnp.float32)

    assert MARKS[platform] in lowered(givens_levels, shapes(), platform)
    stacked = shapes(2, levels=3, n=20, m=130)
    assert MARKS[platform] in lowered(jax.vmap(givens_levels), stacked, platform)
    vmapped = jax.vmap(givens_levels, (None, None, None, 0))
    assert MARKS[platform] in lowered(
        vmapped, (*shapes(levels=3, n=20, m=130)[:3], stacked[3]), platform
    )


def test_a_barrier_stands_between_levels_on_a_gpu():
    """Interpret mode has no threads, and cannot show that it is missing."""
    assert "gpu.barrier" in lowered(givens_levels, problem(0, 2, 6, 5), "cuda")


@pytest.mark.parametrize("platform", MARKS)
def test_xla_and_float64_contain_no_pallas_call(platform):
    run = functools.partial(givens_levels, implementation="xla")
    assert MARKS[platform] not in lowered(run, problem(0, 2, 6, 5), platform)
    with jax.enable_x64(True):
        arguments = problem(0, 2, 6, 5, np.float64)
        assert MARKS[platform] not in lowered(givens_levels, arguments, platform)


def test_automatic_choice_on_a_cpu_is_xla():
    assert "custom_call" not in jax.jit(givens_levels).lower(*problem(0, 2, 6, 5)).as_text()


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(matrix=jnp.ones((3, 2), jnp.bfloat16)), r"matrix is bfloat16\[3, 2\]; expected two"),
        (dict(matrix=jnp.ones(3)), r"matrix is float32\[3\]; expected two axes"),
        (dict(partner=jnp.ones((2, 3))), r"partner is float32\[2, 3\]; expected integers \[levels"),
        (dict(partner=jnp.ones((2, 4), int)), r"partner is int32\[2, 4\]; .* \[levels, 3\]"),
        (dict(cos=jnp.ones((1, 3))), r"cos is float32\[1, 3\]; expected float32\[2, 3\]"),
        (dict(sin=jnp.ones((2, 3), jnp.float16)), r"sin is float16\[2, 3\]; expected float32"),
        (dict(implementation="triton"), "implementation is 'triton'; expected 'xla', 'pallas'"),
    ],
)
def test_wrong_arguments(changes, message):
    partner, cos, sin, matrix = problem(0, 2, 3, 2)
    arguments = dict(partner=partner, cos=cos, sin=sin, matrix=matrix) | changes
    with pytest.raises(ValueError, match=message):
        givens_levels(**arguments)


@pytest.mark.bad_input
def test_pallas_in_float64_and_on_a_cpu():
    with jax.enable_x64(True), pytest.raises(ValueError, match="compute in float32, .* float64"):
        givens_levels(*problem(0, 2, 3, 2, np.float64), implementation="pallas")
    with pytest.raises(NotImplementedError, match="platform"):
        givens_levels(*problem(0, 2, 3, 2), implementation="pallas")
