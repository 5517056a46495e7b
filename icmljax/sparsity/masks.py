"""Masks beside parameters: checked, applied, drawn, counted.

A *mask tree* has the structure of the parameters. A leaf is an array of bool that broadcasts to its
parameter: of its full shape where a weight is sparse, the scalar True where a parameter is dense
(biases, norms), the scalar False where all of it is frozen. Input may have None or a Python bool
for a scalar.

A *density tree* has the structure of the parameters too: a float in (0, 1] for a sparse weight (a
numpy array, one float a layer, for stacked layers), None for what stays dense.

*Stacked layers* (a scan over layers) are one leaf with leading axes. ``stacked(path, leaf)`` tells
how many, for the functions that treat layers apart; paths are joined by "/".
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, ScalarLike

Stacked = Callable[[str, Any], int]


def not_stacked(path: str, leaf: Any) -> int:
    """No leaf holds several layers."""
    del path, leaf
    return 0


def as_masks(params: PyTree, masks: PyTree) -> PyTree:
    """The mask tree in its canonical form: every leaf an array of bool.

    Args:
      params: tree of arrays or of their shapes.
      masks: mask tree; its containers may be of other types (a list for a tuple). What stands where
        ``params`` has None or ``optax.MaskedNode`` is left out.

    Raises:
      ValueError: the trees differ, a mask is not bool or does not broadcast; names the parameter.
    """

    def canonical(name, param, mask):
        mask = jnp.asarray(True if mask is None else mask)
        if mask.dtype != bool:
            raise ValueError(
                f"the mask of {name!r} has dtype {mask.dtype}, expected bool: use mask != 0"
            )
        check_broadcasts(name, mask.shape, shape_of(param))
        return mask

    return map_named(canonical, params, masks, "masks")


def apply_masks(params: PyTree, masks: PyTree) -> PyTree:
    """Parameters (or gradients, updates) with 0 where the mask is False, whatever stood there.

    Raises:
      ValueError: see `as_masks`.
    """
    # Not p * mask: NaN * 0 is NaN, and -1 * 0 is -0.
    return jax.tree.map(
        lambda p, mask: jnp.where(mask, p, jnp.zeros((), jnp.result_type(p))),
        params,
        as_masks(params, masks),
    )


def count(mask: Bool[Array, "..."]) -> Int[Array, ""]:
    """How many entries of one mask are True."""
    return _sum(mask)


def density_of(mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Fraction of one mask that is True (0 for an empty one); float32."""
    return count(mask).astype(jnp.float32) / max(mask.size, 1)


def densities_of(params: PyTree, masks: PyTree, *, stacked: Stacked = not_stacked) -> PyTree:
    """The density tree that masks realise; on the host.

    Args:
      params: tree of arrays or of their shapes.
      masks: mask tree of concrete arrays.
      stacked: see the top of this file.

    Returns:
      The density of each mask, None where the mask is a scalar.

    Raises:
      ValueError: see `as_masks`.
    """

    def density(name, param, mask):
        if mask.ndim == 0:
            return None
        kept, size, _ = _kept_by_layer(name, param, mask, stacked)
        return kept / max(size, 1) if kept.ndim else float(kept) / max(size, 1)

    return map_named(density, params, as_masks(params, masks), "masks")


def random_mask(
    key: PRNGKeyArray, shape: tuple[int, ...], density: Any, *, exact: bool = True
) -> Bool[Array, "..."]:
    """A mask whose True entries are anywhere with equal probability.

    Args:
      key: PRNG key.
      shape: of the mask.
      density: number in [0, 1], or a numpy array of them for the leading axes of ``shape``, each
        entry for a mask of its own.
      exact: ``round(density * size)`` entries are True; otherwise each entry is True with
        probability ``density``, on its own.

    Raises:
      ValueError: a density is out of range or has another shape.
    """
    density = np.asarray(density, np.float64)
    if not np.all((density >= 0) & (density <= 1)):
        raise ValueError(f"density is {density}; expected numbers in [0, 1]")
    lead, own = shape[: density.ndim], shape[density.ndim :]
    if density.shape != lead:
        raise ValueError(
            f"densities have shape {density.shape}; expected the leading axes of {shape}"
        )
    if not exact:
        probability = density.reshape(lead + (1,) * len(own))
        return jax.random.bernoulli(key, jnp.asarray(probability, jnp.float32), shape)
    counts = np.rint(density * math.prod(own)).astype(np.int32).ravel()
    keys = jax.random.split(key, len(counts))
    draw = jax.vmap(lambda key, count: switch_on(key, jnp.zeros(own, bool), count))
    return draw(keys, counts).reshape(shape)


def switch_on(key: PRNGKeyArray, mask: Bool[Array, "*shape"], count: Any) -> Bool[Array, "*shape"]:
    """Switches on further entries of a mask, drawn uniformly, until there are ``count``.

    An entry's random number is compared with the threshold that lets the right number through,
    found by bisection: a sort would be slower.

    Args:
      key: PRNG key.
      mask: what is on already, and stays so.
      count: how many entries are on in the end, may be traced; what is on already where that is
        more, all where it is more than there are.

    Returns:
      The mask.
    """
    free = ~mask
    missing = jnp.maximum(jnp.asarray(count, jnp.int32) - _sum(mask), 0)
    drawn = jax.random.bits(key, mask.shape, jnp.uint32)

    def bisect(bit, threshold):
        higher = threshold | (jnp.uint32(1 << 31) >> bit)
        return jnp.where(_sum(free & (drawn < higher)) <= missing, higher, threshold)

    # The largest threshold with at most as many numbers below it as are missing.
    threshold = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), bisect, jnp.uint32(0))
    below = free & (drawn < threshold)
    equal = (free & (drawn == threshold)).ravel()
    first = jnp.cumsum(equal, dtype=jnp.int32) <= missing - _sum(below)
    return mask | below | (equal & first).reshape(mask.shape)


def _sum(mask):
    return jnp.sum(mask, dtype=jnp.int32)


def random_masks(
    key: PRNGKeyArray,
    params: PyTree,
    densities: PyTree,
    *,
    stacked: Stacked = not_stacked,
    exact: bool = True,
) -> PyTree:
    """Random masks for a whole tree.

    Args:
      key: PRNG key.
      params: tree of arrays or of their shapes.
      densities: density tree.
      stacked: see the top of this file; a single density then holds for every layer.
      exact: see `random_mask`.

    Returns:
      The mask tree.

    Raises:
      ValueError: the trees differ, or a density is out of range; names the parameter.
    """
    keys = iter(jax.random.split(key, 1 + len(jax.tree.leaves(params))))

    def draw(name, param, density):
        own_key = next(keys)
        if density is None:
            return jnp.array(True)
        shape = shape_of(param)
        if np.ndim(density) == 0:
            density = np.full(shape[: stacked(name, param)], density)
        try:
            return random_mask(own_key, shape, density, exact=exact)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: {error}") from error

    return map_named(draw, params, densities, "densities")


def top_k_mask(scores: Array, k: ScalarLike) -> Bool[Array, "..."]:
    """A mask of exactly the k largest scores.

    Args:
      scores: any shape. Of equal scores those with the smaller index win; NaN counts as -inf.
      k: in [0, size]; may be traced (values beyond are then as the nearest of these).

    Raises:
      ValueError: k is out of range.
    """
    if isinstance(k, int | np.integer) and not 0 <= k <= scores.size:
        raise ValueError(f"k is {k}; expected 0 <= k <= {scores.size}, the number of scores")
    flat = scores.ravel()
    if jnp.issubdtype(flat.dtype, jnp.floating):
        flat = jnp.where(jnp.isnan(flat), -jnp.inf, flat)
    order = jnp.argsort(flat, descending=True, stable=True)
    kept = jnp.arange(flat.size) < k
    return jnp.zeros(flat.size, bool).at[order].set(kept, unique_indices=True).reshape(scores.shape)


def global_top_k(scores: PyTree, k: ScalarLike) -> PyTree:
    """Masks of the k largest scores of a whole tree.

    Args:
      scores: tree of arrays; None for what stays dense.
      k: see `top_k_mask`; earlier leaves win among equal scores.

    Returns:
      The mask tree: of the scores' shapes, the scalar True where the scores are None.

    Raises:
      ValueError: k is out of range.
    """
    leaves, treedef = jax.tree.flatten(scores)
    flat = jnp.concatenate([x.ravel() for x in leaves]) if leaves else jnp.zeros(0)
    parts = jnp.split(top_k_mask(flat, k), np.cumsum([x.size for x in leaves])[:-1])
    masks = [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=False)]
    return jax.tree.map(
        lambda mask: jnp.array(True) if mask is None else mask,
        jax.tree.unflatten(treedef, masks),
        is_leaf=lambda x: x is None,
    )


class LayerSparsity(NamedTuple):
    """One row of a report.

    Attributes:
      path: of the parameter, with "[layer]" behind it for one of stacked layers; "total".
      shape: of the layer; () for the total.
      size: number of entries.
      nonzeros: how many of them the mask keeps.
      density: nonzeros / size.
    """

    path: str
    shape: tuple[int, ...]
    size: int
    nonzeros: int
    density: float


def report(
    params: PyTree, masks: PyTree, *, stacked: Stacked = not_stacked
) -> tuple[LayerSparsity, ...]:
    """What each layer keeps, dense ones included, and the total as the last row; on the host.

    Args:
      params: tree of arrays or of their shapes.
      masks: mask tree of concrete arrays.
      stacked: see the top of this file.

    Raises:
      ValueError: see `as_masks`.
    """
    rows: list[LayerSparsity] = []

    def add(name, param, mask):
        kept, size, shape = _kept_by_layer(name, param, mask, stacked)
        for index in np.ndindex(kept.shape):
            path = name + "".join(f"[{i}]" for i in index)
            nonzeros = int(kept[index])
            rows.append(LayerSparsity(path, shape, size, nonzeros, nonzeros / max(size, 1)))

    map_named(add, params, as_masks(params, masks), "masks")
    size, nonzeros = (sum(getattr(row, name) for row in rows) for name in ("size", "nonzeros"))
    return (*rows, LayerSparsity("total", (), size, nonzeros, nonzeros / max(size, 1)))


# ------------------------------------------------------------------- for the modules beside this


def is_hole(x: Any) -> bool:
    """Whether a node stands for a parameter that is not there."""
    return x is None or isinstance(x, optax.MaskedNode)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Shape of an array, of a ``jax.ShapeDtypeStruct``, of a Python number."""
    return tuple(getattr(leaf, "shape", ()))


def path_name(path: Any) -> str:
    """A path as it is shown and given to functions."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_broadcasts(name: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless a mask of shape ``got`` broadcasts to ``shape``."""
    tail = shape[len(shape) - len(got) :]
    if len(got) > len(shape) or any(a not in (1, b) for a, b in zip(got, tail, strict=True)):
        raise ValueError(
            f"the mask of {name!r} has shape {got}, expected {shape} or what broadcasts to it"
        )


def map_named(
    function: Callable[[str, Any, Any], Any], params: PyTree, tree: PyTree, what: str
) -> PyTree:
    """Maps ``function(name, param, leaf)``; leaves may be None, and trees are matched by paths.

    Raises:
      ValueError: the trees differ; names the leaves, ``what`` names the tree.
    """
    found = dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hole))
    treedef: Any
    expected, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_hole)
    holes = {path for path, param in expected if is_hole(param)}
    paths = {path for path, _ in expected} - holes
    # A hole may stand for a whole subtree.
    extra = [p for p in found.keys() - paths if not any(p[:i] in holes for i in range(len(p) + 1))]
    missing = paths - found.keys()
    if missing or extra:
        missing_names, extra_names = (sorted(map(path_name, x)) for x in (missing, extra))
        raise ValueError(
            f"{what} are no tree like the parameters: missing {missing_names[:5]}, unexpected "
            f"{extra_names[:5]}; give every parameter a leaf, None where it stays dense"
        )
    return treedef.unflatten(
        [p if path in holes else function(path_name(path), p, found[path]) for path, p in expected]
    )


def _kept_by_layer(name, param, mask, stacked):
    """Number of entries kept in each layer, size and shape of one layer."""
    shape = shape_of(param)
    lead = 0 if mask.ndim == 0 else stacked(name, param)  # a dense leaf is one row of a report
    own = shape[lead:]
    kept = np.broadcast_to(np.asarray(mask), shape).sum(axis=tuple(range(lead, len(shape))))
    return np.asarray(kept), math.prod(own), own
