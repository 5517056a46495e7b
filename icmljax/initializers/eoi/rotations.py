"""Sparse orthogonal matrices as products of random Givens rotations, and their law.

A matrix with orthonormal rows stays one when a plane rotation mixes two of its columns, and the
supports of the two columns become their union. So rotations of random pairs of columns, by random
angles, take the identity (density ``1 / n``) to any density, exactly orthogonal all the way.

Supports do not depend on angles. The plan is therefore made on supports alone, kept as bit sets,
and what it says is computed afterwards, many rotations at a time: rotations of one *level* touch
different columns.

Reference:
  A. I. Nowak et al., "Sparser, Better, Deeper, Stronger: Improving Static Sparse Training with
  Exact Orthogonal Initialization", ICML 2024, arXiv 2406.01755, section 3 and algorithm 1.
"""

import functools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from icmljax.kernels.givens import givens_levels

Scheme = Literal["iid", "matching"]
Target = Literal["closest", "expected", "exact"]

_LEVELS_AT_ONCE = 16
_MAX_CLOSING_ROTATIONS = 64
_NEVER = np.iinfo(np.int32).max
_SLACK = 1e-9  # a density may be rounded

# ------------------------------------------------------------------------------ the density's law


def _row_counts(n: int) -> Iterator[np.ndarray]:
    """Laws ``p_t`` of the number of non-zeros in a row of n after t = 0, 1, 2, ... rotations.

    The count grows by one iff exactly one of the two columns is non-zero in the row.
    """
    k = np.arange(n + 1.0)
    grows = 2 * k * (n - k) / (n * (n - 1)) if n > 1 else np.zeros(2)
    p = np.zeros(n + 1)
    p[1] = 1
    while True:
        yield p
        moved = p * grows
        p = p - moved
        p[1:] += moved[:-1]


def row_count_distribution(n: int, t: int) -> np.ndarray:
    """Law of the number of non-zeros in one row of ``n`` columns after ``t`` random rotations.

    Args:
      n: number of columns, >= 1.
      t: number of rotations, >= 0.

    Returns:
      Probabilities of 0 .. n non-zeros, float64 of shape (n + 1,).

    Raises:
      ValueError: a number is out of range.
    """
    _check_counts(n, t)
    chain = _row_counts(n)
    for _ in range(t):
        next(chain)
    return next(chain)


def expected_density(n: int, t: int) -> float:
    """Expected density of a matrix with ``n`` columns after ``t`` random rotations, exact.

    Args:
      n: number of columns, >= 1.
      t: number of rotations, >= 0.

    Raises:
      ValueError: a number is out of range.
    """
    return float(row_count_distribution(n, t) @ np.arange(n + 1.0)) / n


def _check_counts(n: int, t: int) -> None:
    if n < 1 or t < 0:
        raise ValueError(f"got n={n} columns and t={t} rotations, expected n >= 1 and t >= 0")


@functools.lru_cache(maxsize=1024)
def rotations_for_density(n: int, density: float) -> int:
    """Number of rotations whose expected density is nearest to ``density``.

    About ``n / 2 * log(density * n)`` where the density is small. Full density is never expected
    exactly: there, less than half an element of an n x n matrix is expected to be missing.

    Args:
      n: number of columns, >= 1.
      density: in [1 / n, 1].

    Raises:
      ValueError: a number is out of range.
    """
    _check_counts(n, 0)
    if not 1 / n - _SLACK <= density <= 1 + _SLACK:
        raise ValueError(f"density is {density}, expected a number in [1/{n}, 1]")
    k = np.arange(n + 1.0)
    before = -math.inf
    for t, p in enumerate(_row_counts(n)):
        reached = float(p @ k) / n
        if reached >= density - 0.5 / n**2:
            return t if abs(reached - density) <= abs(before - density) else t - 1
        before = reached
    raise AssertionError("the chain has no end")


@functools.lru_cache(maxsize=1024)
def _sufficient_rotations(n: int, rows: int) -> int:
    """A number of iid rotations after which the matrix is full but with probability 1e-12.

    Chernoff's bound on the time of one row, a sum of geometric variables, times the rows.
    """
    k = np.arange(1.0, n)
    p = 2 * k * (n - k) / (n * (n - 1))
    if n == 1:
        return 0
    bounds = []
    for fraction in np.linspace(0.05, 0.95, 19):
        rate = -fraction * np.log1p(-p.min()) if p.min() < 1 else 1.0
        moment = np.exp(rate) * p / (1 - (1 - p) * np.exp(rate))
        bounds.append((np.log(moment).sum() + math.log(rows * 1e12)) / rate)
    return math.ceil(min(bounds))


# --------------------------------------------------------------------------------------- the plan


class GivensPlan(NamedTuple):
    """Rotations that take ``[I 0]``, of shape (rows, n), to a sparse matrix of a wanted density.

    Rotation t replaces columns ``i, j = pairs[t]`` by ``cos(a) A_i + sin(a) A_j`` and
    ``cos(a) A_j - sin(a) A_i``, with ``a = angles[t]``. Only the first `n_valid` count.

    Attributes:
      pairs: int32 of shape (T, 2), with i < j < n.
      angles: in radians, shape (T,).
      level: int32 of shape (T,), from 1: rotations of a level touch different columns, and level
        after level does what rotation after rotation does.
      n_valid: int32 scalar, number of rotations.
      support: uint32 of shape (n, words): for each column, bit r % 32 of word r // 32 tells whether
        row r may be non-zero in the result.
      nonzeros: int32 scalar, number of bits set in `support`.
    """

    pairs: jax.Array
    angles: jax.Array
    level: jax.Array
    n_valid: jax.Array
    support: jax.Array
    nonzeros: jax.Array


class Goal(NamedTuple):
    """When to stop, in numbers of non-zeros: integers need no rounding."""

    reach: int | jax.Array  # the fewest that are enough
    twice: int | jax.Array  # twice the wanted number: the nearer of two counts is kept
    most: int | jax.Array
    limit: int | jax.Array  # the most rotations


def goal_of(density: float, rows: int, n: int, scheme: Scheme, target: Target) -> Goal:
    """The goal that a target means for a matrix."""
    capacity = _capacity(rows, n, scheme)
    density = min(density, 1.0)
    wanted = density * rows * n
    if target == "expected":
        return Goal(_NEVER, _NEVER, _NEVER, min(rotations_for_density(n, density), capacity))
    if target == "exact":
        return Goal(round(wanted), _NEVER, round(wanted), capacity)
    slack = 1e-12 * rows * n
    return Goal(math.ceil(wanted - slack), math.floor(2 * wanted + slack), _NEVER, capacity)


def plan_rotations(
    key: PRNGKeyArray,
    rows: int,
    cols: int,
    density: float,
    *,
    scheme: Scheme = "iid",
    target: Target = "closest",
    angle_range: tuple[float, float] = (0.0, 2 * math.pi),
    max_rotations: int | None = None,
    support: Bool[Array, "rows cols"] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> GivensPlan:
    """Draws the rotations of a sparse orthogonal matrix with ``rows <= cols``.

    Works under ``jit`` and ``vmap`` (over keys), with every target.

    Args:
      key: PRNG key.
      rows: number of rows; for a tall matrix plan its transpose.
      cols: number of columns, the axis that is rotated.
      density: wanted fraction of non-zeros, in [1 / cols, 1].
      scheme: "iid" draws every pair uniformly, as in the paper. "matching" draws rounds of disjoint
        pairs that cover all columns: equally orthogonal, with a far smaller spread of row counts.
      target: "closest" stops at the density nearest to the wanted one, at most ``1 / (2 cols)``
        away; "expected" takes the number of rotations whose expected density is nearest, whatever
        the pairs are; "exact" stops before the wanted count is passed and closes the gap by pairs
        that fit (a search of O(cols^2 rows / 32) for each), as far as there are any.
      angle_range: angles are uniform in this open interval, radians.
      max_rotations: capacity T of the plan; default: enough for any density, but with probability
        1e-12.
      support: where the matrix to rotate may be non-zero; default: ``[I 0]``. A matrix with
        orthonormal rows stays one while its support grows.
      dtype: of the angles, float32 or float64.

    Returns:
      The plan.

    Raises:
      ValueError: sizes, density or a choice out of range.

    Reference:
      Algorithm 1 of the paper; its rule of stopping is "closest".
    """
    if not 1 <= rows <= cols:
        raise ValueError(f"got {rows} rows and {cols} columns, expected 1 <= rows <= columns")
    check_size(rows, cols)
    check_density(density, 1 / cols, f"a matrix of shape {(rows, cols)}")
    check_law(scheme, target, angle_range)
    if target == "expected" and support is not None:
        raise ValueError(
            "target 'expected' knows how the density grows from [I 0], not from a support"
        )
    if max_rotations is not None and max_rotations < 0:
        raise ValueError(f"max_rotations is {max_rotations}, expected a number >= 0")
    if support is not None and support.shape != (rows, cols):
        raise ValueError(f"support has shape {support.shape}, expected {(rows, cols)}")
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"dtype is {dtype}, expected float32 or float64")
    goal = goal_of(density, rows, cols, scheme, target)
    if max_rotations is not None:
        goal = goal._replace(limit=min(goal.limit, max_rotations))
    return draw_plan(
        key,
        rows,
        cols,
        Goal(*np.asarray(goal, np.int32)),
        scheme=scheme,
        exact=target == "exact",
        angle_range=angle_range,
        support=support,
        capacity=max_rotations,
        dtype=dtype,
    )


def check_size(rows: int, cols: int) -> None:
    """Refuses matrices whose elements 32 bits cannot count.

    Raises:
      ValueError: from 2^30 elements on.
    """
    if rows * cols >= 2**30:
        raise ValueError(
            f"a matrix of shape {(rows, cols)} is too large: expected < 2**30 elements"
        )


def check_law(scheme: Scheme, target: Target, angle_range: tuple[float, float]) -> None:
    """Refuses choices that `plan_rotations` does not know.

    Raises:
      ValueError: names the choice.
    """
    if scheme not in ("iid", "matching"):
        raise ValueError(f"scheme is {scheme!r}, expected 'iid' or 'matching'")
    if target not in ("closest", "expected", "exact"):
        raise ValueError(f"target is {target!r}, expected 'closest', 'expected' or 'exact'")
    if target == "expected" and scheme != "iid":
        raise ValueError(f"target 'expected' is the law of scheme 'iid', got scheme {scheme!r}")
    if not -math.inf < angle_range[0] < angle_range[1] < math.inf:
        raise ValueError(f"angle_range is {angle_range}, expected two numbers in ascending order")


@functools.partial(
    jax.jit,
    static_argnames=("rows", "cols", "scheme", "exact", "angle_range", "capacity", "dtype"),
)
def draw_plan(
    key: PRNGKeyArray,
    rows: int,
    cols: int,
    goal: Goal,
    *,
    scheme: Scheme,
    exact: bool,
    angle_range: tuple[float, float],
    support: Array | None = None,
    capacity: int | None = None,
    dtype: np.dtype,
) -> GivensPlan:
    """`plan_rotations` without checks, for a goal that may be traced."""
    if capacity is None:
        capacity = _capacity(rows, cols, scheme)
    pair_key, angle_key = jax.random.split(key)
    pairs = _draw_pairs(pair_key, cols, capacity, scheme)
    angles = _draw_angles(angle_key, len(pairs), angle_range, dtype)
    start = _identity_support(rows, cols) if support is None else pack_support(support.T)
    return _follow(pairs, angles, start, goal, jax.random.fold_in(key, 2) if exact else None)


def check_density(density: float | np.ndarray, smallest: float, what: str) -> None:
    """Refuses densities (one, or an array of them) outside [smallest, 1].

    Raises:
      ValueError: says for what, and which are possible.
      TypeError: a density is traced.
    """
    if isinstance(density, jax.core.Tracer):
        raise TypeError(
            f"the density of {what} is traced, expected a concrete number: leave it out of jit's"
            " and vmap's arguments, or make it static"
        )
    values = np.asarray(density, np.float64)
    if not np.all((values >= smallest - _SLACK) & (values <= 1 + _SLACK)):
        raise ValueError(
            f"density {density} cannot be had for {what}: expected a number in"
            f" [{smallest:.6g}, 1]; below, no orthogonal matrix has so few non-zeros"
        )


def _capacity(rows: int, cols: int, scheme: Scheme) -> int:
    if scheme == "iid":
        return _sufficient_rotations(cols, rows)
    return (2 * math.ceil(math.log2(cols)) + 40) * (cols // 2) if cols > 1 else 0


def _draw_pairs(key, n: int, capacity: int, scheme: Scheme) -> jax.Array:
    """Ordered pairs of different columns."""
    if capacity == 0 or n < 2:
        return jnp.zeros((0, 2), jnp.int32)
    if scheme == "matching":
        return _matchings(key, n, capacity)
    i, j = _below(n, key, capacity)
    j = j + (j >= i)
    return jnp.stack([jnp.minimum(i, j), jnp.maximum(i, j)], axis=1)


def _below(n: int, key, count: int) -> tuple[jax.Array, jax.Array]:
    """Uniform numbers below n, and below n - 1; each as likely as any other to n / 2^32."""
    if n >= 2**16:
        first, second = jax.random.split(key)
        draw = functools.partial(jax.random.randint, shape=(count,), minval=0, dtype=jnp.int32)
        return draw(first, maxval=n), draw(second, maxval=n - 1)
    # floor(n bits / 2^32), by halves: `randint` takes several times as long to compile.
    bits = jax.random.bits(key, (2, count), jnp.uint32)
    size = jnp.array([[n], [n - 1]], jnp.uint32)
    high, low = bits >> 16, bits & 0xFFFF
    i, j = ((high * size + ((low * size) >> 16)) >> 16).astype(jnp.int32)
    return i, j


def _matchings(key, n: int, count: int) -> jax.Array:
    """Pairs of columns from rounds that pair all columns (but one, of an odd number)."""
    rounds = jax.random.split(key, -(-count // (n // 2)))
    columns = jnp.arange(n, dtype=jnp.int32)
    order = jax.vmap(jax.random.permutation, (0, None))(rounds, columns)[:, : n // 2 * 2]
    return jnp.sort(order.reshape(-1, 2)[:count], axis=1)


def _draw_angles(key, count: int, angle_range: tuple[float, float], dtype) -> jax.Array:
    """Uniform in the open interval: an angle of exactly 0 would leave zeros in the support."""
    low, high = angle_range
    bits = jax.random.bits(key, (count,), jnp.uint32) >> 9
    unit = (bits.astype(dtype) + 0.5) * 2.0**-23
    return (low + (high - low) * unit).astype(dtype)


def _identity_support(rows: int, n: int) -> jax.Array:
    """Column r of ``[I 0]`` holds row r alone."""
    words = -(-rows // 32)
    support = np.zeros((n, words), np.uint32)
    r = np.arange(rows)
    support[r, r // 32] = np.uint32(1) << (r % 32).astype(np.uint32)
    return jnp.asarray(support)


def pack_support(support: Bool[Array, "cols rows"]) -> Array:
    """Columns of a support as bit sets: uint32 of shape (cols, words)."""
    cols, rows = support.shape
    padded = jnp.pad(support, ((0, 0), (0, -rows % 32))).reshape(cols, -1, 32)
    return jnp.sum(padded.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1)


def unpack_support(support: Array, rows: int) -> Bool[Array, "cols rows"]:
    """The inverse of `pack_support`."""
    bits = (support[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(support.shape[0], -1)[:, :rows].astype(bool)


def _size(bits: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.population_count(bits).astype(jnp.int32), axis=-1, dtype=jnp.int32)


class _Progress(NamedTuple):
    t: jax.Array
    nonzeros: jax.Array
    support: jax.Array
    last: jax.Array  # level of the last rotation of each column
    level: jax.Array
    done: jax.Array


def _rotate(progress: _Progress, pair: jax.Array, goal: Goal) -> _Progress:
    """One rotation of the supports, unless the goal is better met without it."""
    t, nonzeros, support, last, levels, _ = progress
    first, second = (jax.lax.dynamic_index_in_dim(support, x, keepdims=False) for x in pair)
    after = nonzeros + _size(first ^ second)
    nearer_before = (after >= goal.reach) & (nonzeros + after > goal.twice)
    stop = nearer_before | (after > goal.most)
    union = first | second
    level = 1 + jnp.max(last[pair])

    def write(k, columns):
        support, last = columns
        return support.at[pair[k]].set(union), last.at[pair[k]].set(level)

    # A loop of writes, none when stopped: XLA then updates the support in place, and does not copy
    # all of it for every rotation.
    support, last = jax.lax.fori_loop(0, jnp.where(stop, 0, 2), write, (support, last))
    return _Progress(
        t + ~stop,
        jnp.where(stop, nonzeros, after),
        support,
        last,
        levels.at[t].set(level),
        stop | (after >= goal.reach) | (t + 1 >= goal.limit),
    )


def _follow(pairs, angles, support, goal: Goal, closing_key) -> GivensPlan:
    """Rotates supports until the goal is reached."""
    nonzeros = jnp.sum(_size(support), dtype=jnp.int32)
    progress = _Progress(
        t=jnp.int32(0),
        nonzeros=nonzeros,
        support=support,
        last=jnp.zeros(len(support), jnp.int32),
        level=jnp.zeros(len(pairs), jnp.int32),
        done=(nonzeros >= goal.reach) | (goal.limit == 0),
    )
    if len(pairs):
        progress = jax.lax.while_loop(
            lambda p: ~p.done, lambda p: _rotate(p, pairs[p.t], goal), progress
        )
        if closing_key is not None:
            pairs, progress = _close(pairs, progress, goal, closing_key)
    return GivensPlan(
        pairs, angles, progress.level, progress.t, progress.support, progress.nonzeros
    )


def _close(pairs, progress: _Progress, goal: Goal, key) -> tuple[jax.Array, _Progress]:
    """Rotates pairs that add as much as is missing, or else as much of it as any pair does."""
    n = len(progress.support)

    def closing(state):
        pairs, progress, number = state
        missing = goal.reach - progress.nonzeros
        keys = jax.random.split(jax.random.fold_in(key, number), n)

        def best_partner(inputs):
            column, key = inputs
            gain = _size(progress.support ^ column)
            # Ties are broken at random, gains that do not fit are out.
            score = jnp.where(
                (gain > 0) & (gain <= missing), gain + jax.random.uniform(key, (n,)), 0
            )
            return jnp.max(score), jnp.argmax(score)

        scores, partners = jax.lax.map(best_partner, (progress.support, keys))
        i = jnp.argmax(scores)
        j = partners[i]
        pair = jnp.stack([jnp.minimum(i, j), jnp.maximum(i, j)]).astype(jnp.int32)
        fits = (scores[i] > 0) & (progress.t < goal.limit)
        pairs = jnp.where(fits, pairs.at[progress.t].set(pair), pairs)
        rotated = _rotate(progress, pair, goal)
        progress = jax.tree.map(lambda new, old: jnp.where(fits, new, old), rotated, progress)
        return pairs, progress._replace(done=progress.done | ~fits), number + 1

    def unfinished(state):
        _, progress, number = state
        return ~progress.done & (number < _MAX_CLOSING_ROTATIONS)

    state = pairs, progress._replace(done=progress.nonzeros >= goal.reach), jnp.int32(0)
    pairs, progress, _ = jax.lax.while_loop(unfinished, closing, state)
    return pairs, progress


# ------------------------------------------------------------------------------ what the plan says


def apply_plan(
    plan: GivensPlan,
    matrix: Float[Array, "rows cols"],
    *,
    implementation: Literal["xla", "pallas"] | None = None,
) -> Float[Array, "rows cols"]:
    """Rotates the columns of a matrix as planned.

    Args:
      plan: for as many columns.
      matrix: float32 or float64; ``[I 0]`` for a new orthogonal matrix.
      implementation: of `icmljax.kernels.givens.givens_levels`.

    Returns:
      The rotated matrix.

    Raises:
      ValueError: the plan is for another number of columns.
    """
    if matrix.shape[1] != len(plan.support):
        raise ValueError(
            f"the plan rotates {len(plan.support)} columns, got a matrix of shape {matrix.shape}"
        )
    return rotate_rows(plan, matrix.T, implementation).T


def rotate_rows(plan: GivensPlan, matrix, implementation=None):
    """`apply_plan` of the transposes: rows of memory are what is rotated."""
    n = len(matrix)
    idle = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (_LEVELS_AT_ONCE, n))
    cos, sin = (f(plan.angles).astype(matrix.dtype) for f in (jnp.cos, jnp.sin))
    i, j = plan.pairs.T
    # Unused rotations are at level -1, which no table has.
    level = jnp.where(jnp.arange(len(i)) < plan.n_valid, plan.level - 1, -1)
    depth = jnp.max(level, initial=-1) + 1

    def some_levels(state):
        base, matrix = state
        row = level - base
        row = jnp.where((row >= 0) & (row < _LEVELS_AT_ONCE), row, _LEVELS_AT_ONCE)

        def table(start, at_i, at_j):
            return start.at[row, i].set(at_i, mode="drop").at[row, j].set(at_j, mode="drop")

        ones = jnp.ones(idle.shape, matrix.dtype)
        matrix = givens_levels(
            table(idle, j, i),
            table(ones, cos, cos),
            table(0 * ones, sin, -sin),
            matrix,
            implementation=implementation,
        )
        return base + _LEVELS_AT_ONCE, matrix

    _, matrix = jax.lax.while_loop(
        lambda state: state[0] < depth, some_levels, (jnp.int32(0), matrix)
    )
    return matrix
