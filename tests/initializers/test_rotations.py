"""Plans of rotations: the authors' matrices, the law of the draws, levels, targets, growth."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from icmljax.initializers import eoi
from icmljax.initializers.eoi import rotations
from tests.initializers.common import fits, golden, keys, orthogonality_error

MATRICES = ("square_64_d0125", "wide_24_60_d02", "tall_60_24_d02", "square_16_dense")
NEVER = np.iinfo(np.int32).max
KEY = jax.random.key(0)
FLOAT32 = np.dtype("float32")


# ------------------------------------------------------------------------ numbers of the authors


def unpack(support, rows):
    """Bit sets as bool [columns, rows], by NumPy's own."""
    words = np.ascontiguousarray(np.asarray(support).astype("<u4"))
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :rows].astype(bool)


def pack(support):
    bits = np.pad(support, ((0, 0), (0, -support.shape[1] % 32)))
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)


LENGTH = 100  # of all plans, so that those of one shape share a program


def replay(case):
    """Rows, columns and the plan of the rotations of a case, its levels from their definition."""
    rows, cols = sorted(int(x) for x in case["shape"])
    kept = int(case["kept"])
    pairs, angles, level = (
        np.ones((LENGTH, 2), np.int32),
        np.ones(LENGTH),
        np.ones(LENGTH, np.int32),
    )
    pairs[:kept], angles[:kept] = case["pairs"][:kept], case["angles"][:kept]
    last, support = np.zeros(cols, int), np.eye(cols, rows, dtype=bool)
    for t, (i, j) in enumerate(pairs[:kept]):
        level[t] = last[i] = last[j] = 1 + max(last[i], last[j])
        support[i] = support[j] = support[i] | support[j]
    plan = eoi.GivensPlan(
        pairs,
        angles,
        level,
        np.int32(kept),
        pack(support),
        np.int32(support.sum()),
    )
    return rows, cols, plan


turn = jax.jit(eoi.apply_plan)


@pytest.mark.parametrize("name", MATRICES)
def test_same_rotations_make_the_same_matrix(name):
    case = golden(name)
    tall = case["shape"][0] > case["shape"][1]
    for x64, tolerance in ((True, 1e-12), (False, 5e-6)):
        with jax.enable_x64(x64):
            rows, cols, plan = replay(case)
            matrix = np.asarray(turn(plan, np.eye(rows, cols)))
        expected = case["matrix_f64" if x64 else "matrix_f32"]
        assert matrix.dtype == expected.dtype
        np.testing.assert_allclose(matrix.T if tall else matrix, expected, rtol=0, atol=tolerance)


@functools.partial(jax.jit, static_argnums=(0, 1))
def follow(rows, cols, pairs, goal):
    angles = jnp.zeros(len(pairs))
    start = rotations._identity_support(rows, cols)
    return rotations._follow(pairs, angles, start, rotations.Goal(*goal), None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def follow_all(rows, cols, pairs, limits):
    def one(limit):
        return follow(rows, cols, pairs, rotations.Goal(NEVER, NEVER, NEVER, limit))

    return jax.vmap(one)(limits)


@pytest.mark.parametrize("name", MATRICES)
def test_same_rotations_stop_at_the_same_density(name):
    case = golden(name)
    rows, cols, plan = replay(case)
    kept, drawn = int(case["kept"]), case["pairs"]
    # Further rotations that a wrong rule would take.
    first = np.random.default_rng(0).integers(0, cols - 1, LENGTH - len(drawn))
    more = np.stack([first, first + 1], axis=1).astype(np.int32)
    pairs = jnp.asarray(np.concatenate([drawn, more]))
    goal = rotations.goal_of(float(case["target"]), rows, cols, "iid", "closest")
    done = follow(rows, cols, pairs, goal)
    assert done.n_valid == kept
    np.testing.assert_array_equal(done.level[:kept], plan.level[:kept])
    np.testing.assert_array_equal(done.support, plan.support)
    support = unpack(done.support, rows).T
    matrix = case["matrix_f64"] if len(case["matrix_f64"]) == rows else case["matrix_f64"].T
    np.testing.assert_array_equal(support, matrix != 0)

    # The densities on the way.
    limits = np.minimum(np.arange(LENGTH + 1), len(drawn))
    path = follow_all(rows, cols, pairs, jnp.asarray(limits))
    np.testing.assert_array_equal(path.n_valid, limits)
    densities = np.asarray(path.nonzeros)[: len(drawn) + 1] / (rows * cols)
    np.testing.assert_array_equal(densities, case["density_path"])


@pytest.mark.parametrize(
    ("wanted", "kept", "count"),
    [(4, 0, 4), (4.9, 0, 4), (5, 1, 6), (6, 1, 6), (6.9, 2, 6), (7, 3, 8), (9.9, 3, 8), (10, 4, 12),
     (12, 4, 12), (14, 5, 16), (16, 5, 16)],
)  # fmt: skip
def test_the_nearer_density_is_kept_and_of_two_equal_ones_the_later(wanted, kept, count):
    pairs = jnp.array([[0, 1], [0, 1], [2, 3], [1, 2], [0, 3]])  # 4, 6, 6, 8, 12, 16 non-zeros
    goal = rotations.goal_of(wanted / 16, 4, 4, "iid", "closest")
    done = follow(4, 4, pairs, goal)
    assert (done.n_valid, done.nonzeros) == (kept, count)


# ------------------------------------------------------------------------------- the density's law


@pytest.mark.parametrize("n", [10, 64, 256])
def test_expected_density_and_law_of_row_counts(n):
    case = golden(f"expected_density_n{n}")
    last = len(case["expected"]) - 1
    for t in sorted({0, 1, 2, 3, *range(0, last, max(1, last // 12)), last}):
        np.testing.assert_allclose(eoi.expected_density(n, t), case["expected"][t], rtol=1e-12)
    law = eoi.row_count_distribution(n, last)
    np.testing.assert_allclose(law, case["final_row_count_pmf"], rtol=1e-12, atol=1e-15)


def test_expected_density_by_hand():
    assert eoi.expected_density(1, 5) == 1
    assert eoi.expected_density(2, 0) == 0.5
    for t in (1, 2, 7):
        np.testing.assert_allclose(eoi.expected_density(2, t), 1, rtol=1e-15)
    np.testing.assert_allclose(
        [eoi.expected_density(3, t) for t in range(3)], [1 / 3, 5 / 9, 7 / 9], rtol=1e-14
    )
    np.testing.assert_allclose(
        eoi.row_count_distribution(3, 2), [0, 1 / 9, 4 / 9, 4 / 9], rtol=1e-14
    )


def test_rotations_for_density_is_the_nearest():
    expected = golden("expected_density_n64")["expected"]
    for density in (1 / 64, 0.02, 0.05, 0.1234, 0.5 * (expected[30] + expected[31]) + 1e-9):
        t = eoi.rotations_for_density(64, density)
        assert abs(expected[t] - density) <= np.abs(expected - density).min() + 1e-12
    assert eoi.rotations_for_density(1, 1.0) == 0
    assert eoi.rotations_for_density(2, 1.0) == 1
    for n in (64, 256, 1024):  # the mean field's
        about = n / 2 * math.log(0.125 * (n - 1) / 0.875)
        assert eoi.rotations_for_density(n, 0.125) == pytest.approx(about, rel=0.03)
    t = eoi.rotations_for_density(40, 1.0)
    assert eoi.expected_density(40, t) >= 1 - 0.5 / 40**2 > eoi.expected_density(40, t - 1)


# ---------------------------------------------------------------------------- the law of the draws
# Fixed keys; each p-value below is under its bound once in a thousand keys.


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def supports(keys, n, t, scheme):
    """Supports [draws, columns, rows] after exactly t rotations."""

    def draw(key):
        goal = rotations.Goal(NEVER, NEVER, NEVER, t)
        plan = rotations.draw_plan(
            key, n, n, goal,
            scheme=scheme, exact=False, angle_range=(0.0, 1.0), capacity=t, dtype=FLOAT32,
        )  # fmt: skip
        return rotations.unpack_support(plan.support, n)

    return jax.vmap(draw)(keys)


def row_counts(scheme, n=10, t=12, draws=3000):
    counts = np.asarray(supports(keys(1, draws), n, t, scheme)).sum(axis=1)
    return counts, counts[np.arange(draws), np.arange(draws) % n]  # one row each: independent


def row_count_fit(one_each, n=10, t=12):
    law = eoi.row_count_distribution(n, t)
    return fits(np.bincount(one_each, minlength=n + 1)[1:], law[1:])


def test_row_counts_have_the_law():
    counts, one_each = row_counts("iid")
    assert row_count_fit(one_each) > 1e-3
    densities = counts.mean(axis=1) / 10
    error = densities.std() / math.sqrt(len(densities))
    assert abs(densities.mean() - eoi.expected_density(10, 12)) < 4 * error


def test_other_samplers_do_not_pass_for_that_law():
    _, one_each = row_counts("matching")
    assert row_count_fit(one_each) < 1e-9
    equal_rows = np.full(3000, round(10 * eoi.expected_density(10, 12)))
    assert row_count_fit(equal_rows) < 1e-9


def test_pairs_and_angles_are_uniform():
    n, count = 10, 9000
    plan = eoi.plan_rotations(jax.random.key(2), n, n, 1.0, max_rotations=count)
    i, j = np.asarray(plan.pairs).T
    assert (i < j).all() and i.min() == 0 and j.max() == n - 1
    cells = np.bincount(i * n + j, minlength=n * n).reshape(n, n)[np.triu_indices(n, 1)]
    assert cells.sum() == count
    assert fits(cells, np.full(45, 1 / 45)) > 1e-3
    # Neighbours in the sequence are independent: pairs that meet again at once.
    again = np.mean((i[1:] == i[:-1]) & (j[1:] == j[:-1]))
    assert abs(again - 1 / 45) < 4 * math.sqrt(1 / 45 / count)
    assert scipy.stats.kstest(np.asarray(plan.angles) / (2 * np.pi), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("x64", [False, True])
def test_angles_keep_to_their_open_interval(x64):
    with jax.enable_x64(x64):
        dtype = np.dtype("float64" if x64 else "float32")
        angles = rotations._draw_angles(jax.random.key(3), 4000, (-0.2, 0.1), dtype)
        assert angles.dtype == dtype
        angles = np.asarray(angles)
    assert angles.min() > -0.2 and angles.max() < 0.1 and (angles != 0).all()
    assert scipy.stats.kstest((angles + 0.2) / 0.3, "uniform").pvalue > 1e-3
    assert len(np.unique(angles)) > 3990


def test_float64_angles_without_x64_are_float32():
    plan = eoi.plan_rotations(KEY, 7, 7, 1.0, dtype=jnp.float64)
    assert plan.angles.dtype == jnp.float32
    assert np.asarray(plan.angles).std() > 1


def test_no_draw_gives_an_end_of_the_interval(monkeypatch):
    for dtype, bits in ((jnp.float32, 0), (jnp.float32, 2**32 - 1)):
        monkeypatch.setattr(
            rotations.jax.random,
            "bits",
            lambda key, shape, dtype, b=bits: jnp.full(shape, b, dtype),
        )
        angle = float(rotations._draw_angles(None, 1, (0.0, 2 * math.pi), dtype)[0])
        assert 0 < angle < float(np.float32(2 * math.pi))


def test_matching_touches_each_column_once_in_a_round():
    for n in (8, 9):
        pairs = rotations._draw_pairs(jax.random.key(4), n, 5 * (n // 2), "matching")
        rounds = np.asarray(pairs).reshape(5, -1).tolist()
        assert all(len(set(columns)) == n // 2 * 2 for columns in rounds)
        assert len(set(map(tuple, rounds))) == 5


# -------------------------------------------------------------------------------------- the plan


@functools.partial(jax.jit, static_argnums=(1, 2, 4, 5, 6))
def draw(key, rows, cols, goal, scheme, exact, dtype):
    full_turn = (0.0, 2 * math.pi)
    return rotations.draw_plan(
        key, rows, cols, goal, scheme=scheme, exact=exact, angle_range=full_turn, dtype=dtype
    )


def plan_of(key, rows, cols, density, scheme="iid", target="closest", dtype="float32"):
    """`plan_rotations`, compiled once for all densities of a shape."""
    goal = rotations.goal_of(density, rows, cols, scheme, target)
    return draw(key, rows, cols, goal, scheme, target == "exact", np.dtype(dtype))


def valid(plan):
    t = int(plan.n_valid)
    return tuple(np.asarray(x)[:t] for x in (plan.pairs, plan.angles, plan.level))


def test_levels_are_the_sequence_bit_for_bit():
    rows, cols = 40, 48
    with jax.enable_x64(True):
        plan = plan_of(jax.random.key(5), rows, cols, 0.97, dtype="float64")
        levelled = np.asarray(turn(plan, np.eye(rows, cols)))
        numbers = jnp.arange(1, len(plan.pairs) + 1, dtype=jnp.int32)
        in_order = np.asarray(turn(plan._replace(level=numbers), np.eye(rows, cols)))
        # As XLA computes them: NumPy's cosine may differ in the last bit.
        cos, sin = (np.asarray(f(plan.angles)) for f in (jnp.cos, jnp.sin))
        assert plan.pairs.dtype == plan.level.dtype == plan.nonzeros.dtype == jnp.int32
    pairs, _, level = valid(plan)
    sequence = np.eye(rows, cols)  # by the paper's formulas
    for (i, j), c, s in zip(pairs, cos, sin, strict=False):
        a, b = sequence[:, i].copy(), sequence[:, j].copy()
        sequence[:, i], sequence[:, j] = c * a + s * b, c * b - s * a
    assert 0 < plan.n_valid < len(plan.pairs)
    assert level.max() > 16  # more than one table of levels
    np.testing.assert_array_equal(levelled, in_order)
    np.testing.assert_array_equal(levelled, sequence)
    assert orthogonality_error(levelled) < 1e-13
    # In each level a column is touched once.
    for number in range(1, level.max() + 1):
        columns = pairs[level == number]
        assert len(columns) and len(np.unique(columns)) == columns.size
    support = unpack(plan.support, rows).T
    np.testing.assert_array_equal(levelled != 0, support)
    assert support.sum() == plan.nonzeros


def test_support_is_packed_and_unpacked():
    support = np.random.default_rng(0).random((5, 70)) < 0.4
    packed = rotations.pack_support(jnp.asarray(support))
    assert packed.shape == (5, 3)
    np.testing.assert_array_equal(packed, pack(support))
    np.testing.assert_array_equal(unpack(packed, 70), support)
    np.testing.assert_array_equal(rotations.unpack_support(packed, 70), support)
    assert int(rotations._size(packed).sum()) == support.sum()


def test_plans_under_vmap_are_those_of_a_loop():
    some = keys(6, 4)
    together = jax.vmap(lambda key: eoi.plan_rotations(key, 20, 30, 0.3))(some)
    for index, key in enumerate(some):
        alone = plan_of(key, 20, 30, 0.3)
        jax.tree.map(
            np.testing.assert_array_equal, alone, jax.tree.map(lambda x, i=index: x[i], together)
        )
    assert len(np.unique(np.asarray(together.pairs)[:, 0], axis=0)) > 1


# -------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("scheme", ["iid", "matching"])
def test_exact_target_is_reached(scheme):
    for density in (0.05, 0.21, 0.5, 0.9, 1.0):
        plan = plan_of(jax.random.key(7), 20, 30, density, scheme=scheme, target="exact")
        assert plan.nonzeros == round(density * 600), density
        matrix = np.asarray(turn(plan, np.eye(20, 30)))
        assert orthogonality_error(matrix) < 2e-6
        assert np.count_nonzero(matrix) == plan.nonzeros
        pairs, _, _ = valid(plan)
        assert (pairs[:, 0] < pairs[:, 1]).all()


def test_exact_target_out_of_reach_is_the_nearest_below_and_reported():
    """The only rotation of two columns fills the matrix: 2 or 4 non-zeros, never 3."""
    plan = plan_of(jax.random.key(8), 2, 2, 0.75, target="exact")
    assert plan.nonzeros == 2 and plan.n_valid == 0


def test_expected_target_takes_a_fixed_number_of_rotations():
    plans = [plan_of(key, 20, 30, 0.3, target="expected") for key in keys(9, 5)]
    assert {int(plan.n_valid) for plan in plans} == {eoi.rotations_for_density(30, 0.3)}
    counts = [int(plan.nonzeros) for plan in plans]
    assert len(set(counts)) > 1
    assert abs(np.mean(counts) / 600 - 0.3) < 0.05


def test_matching_spreads_rows_less():
    spread = {"iid": [], "matching": []}
    for scheme, stds in spread.items():
        for key in keys(10, 5):
            plan = plan_of(key, 20, 30, 0.4, scheme=scheme)
            assert abs(int(plan.nonzeros) - 240) <= 10
            rows = unpack(plan.support, 20).sum(axis=0)
            stds.append(rows.std())
    assert max(spread["matching"]) < min(spread["iid"])


def test_at_most_max_rotations():
    plan = eoi.plan_rotations(KEY, 7, 7, 1.0, max_rotations=3)
    assert plan.n_valid == 3 and plan.pairs.shape == (3, 2)
    none = eoi.plan_rotations(KEY, 7, 7, 1.0, max_rotations=0)
    assert none.n_valid == 0 and none.nonzeros == 7
    np.testing.assert_array_equal(turn(none, np.eye(7)), np.eye(7))


def test_growth_keeps_orthogonality():
    """A matrix with orthonormal rows is rotated further, to the density of its larger support."""
    first = plan_of(jax.random.key(12), 20, 30, 0.1)
    matrix = turn(first, np.eye(20, 30))
    support = jnp.asarray(unpack(first.support, 20).T)
    more = eoi.plan_rotations(jax.random.key(13), 20, 30, 0.25, support=support)
    grown = np.asarray(turn(more, matrix))
    assert orthogonality_error(grown) < 2e-6
    assert more.n_valid > 0
    assert abs(int(more.nonzeros) - 150) <= 10
    after = unpack(more.support, 20).T
    np.testing.assert_array_equal(after, grown != 0)
    assert (after | ~np.asarray(support)).all()
    same = eoi.plan_rotations(jax.random.key(13), 20, 30, 0.05, support=support)
    assert same.n_valid == 0


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "choices", "message"),
    [
        ((5, 4, 0.5), {}, "got 5 rows and 4 columns, expected 1 <= rows <= columns"),
        ((0, 4, 0.5), {}, "got 0 rows"),
        ((4, 5, 0.19), {}, r"density 0.19 .*\(4, 5\): expected a number in \[0.2, 1\]"),
        ((32, 32, 0.01), {}, r"density 0.01 .*\[0.03125, 1\]"),
        ((4, 5, 1.01), {}, "density 1.01"),
        ((4, 5, math.nan), {}, "density nan"),
        ((4, 5, -0.1), {}, "density -0.1"),
        ((2**15, 2**15, 0.5), {}, "too large"),
        ((4, 5, 0.5), {"scheme": "iidd"}, "scheme is 'iidd', expected 'iid' or 'matching'"),
        ((4, 5, 0.5), {"target": "near"}, "target is 'near', expected 'closest', 'exp"),
        ((4, 5, 0.5), {"target": "expected", "scheme": "matching"}, "law of scheme 'iid'"),
        ((4, 5, 0.5), {"target": "expected", "support": np.eye(4, 5, dtype=bool)}, "support"),
        ((4, 5, 0.5), {"angle_range": (1.0, 1.0)}, r"angle_range is \(1.0, 1.0\)"),
        ((4, 5, 0.5), {"angle_range": (0.0, math.inf)}, "angle_range"),
        ((4, 5, 0.5), {"max_rotations": -1}, "max_rotations is -1"),
    ],
)
def test_bad_plans(arguments, choices, message):
    with pytest.raises(ValueError, match=message):
        eoi.plan_rotations(KEY, *arguments, **choices)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eoi.expected_density(0, 1), "n=0"),
        (lambda: eoi.expected_density(3, -1), "t=-1"),
        (lambda: eoi.row_count_distribution(0, 0), "n=0"),
        (lambda: eoi.rotations_for_density(4, 0.2), r"density is 0.2, expected .* \[1/4, 1\]"),
        (lambda: eoi.rotations_for_density(4, 1.1), "density is 1.1"),
        (lambda: eoi.rotations_for_density(4, math.nan), "density is nan"),
    ],
)
def test_bad_counts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_density_may_be_rounded():
    for density in (1 / 7 - 1e-10, 1 + 1e-10):
        plan = eoi.plan_rotations(KEY, 7, 7, density)
        assert plan.nonzeros == (49 if density > 0.5 else 7)
        assert plan.n_valid < len(plan.pairs)


@pytest.mark.bad_input
def test_what_does_not_fit_a_plan():
    plan = eoi.plan_rotations(KEY, 7, 7, 1.0)
    with pytest.raises(ValueError, match="7.* 6"):
        eoi.apply_plan(plan, jnp.eye(6))
    with pytest.raises(ValueError, match=r"\(6, 7\).*\(7, 7\)"):
        eoi.plan_rotations(KEY, 7, 7, 1.0, support=jnp.ones((6, 7), bool))
