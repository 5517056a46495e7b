"""How dense each layer is to be, from the shapes of the layers alone."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from icmljax.sparsity.masks import Stacked, not_stacked, path_name

Method = Literal["uniform", "uniform_skip", "erk", "er", "balanced"]
# Told the path of a leaf and the shape and dtype of one of its layers: whether it is made sparse.
Filter = Callable[[str, jax.ShapeDtypeStruct], bool]


def is_weight(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf is floating point and has two axes or more: no bias, no norm."""
    del path
    return len(leaf.shape) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)


def layer_densities(
    params: PyTree,
    density: float,
    method: Method = "uniform",
    *,
    filter_fn: Filter = is_weight,
    stacked: Stacked = not_stacked,
    er_axes: tuple[int, int] = (-2, -1),
) -> PyTree:
    """Shares a total density out among layers.

    Args:
      params: tree of arrays or of their shapes.
      density: of all selected leaves together (with "uniform_skip": of those between the ends), in
        (0, 1].
      method: one of

        - "uniform": the same in every layer;
        - "uniform_skip": the same too, but the first and the last layer stay dense. Layers are in
          the order of their paths ("conv_2" before "conv_10"); where names do not sort like the
          network, take "uniform" and a ``filter_fn`` that leaves the ends out;
        - "erk": proportional to ``sum(shape) / prod(shape)`` (Erdős–Rényi with kernel axes);
        - "er": the same of the input and the output axis alone;
        - "balanced": the same number of weights in every layer.

        Where the last three ask for more than 1, a layer is dense and the others share the rest.
      filter_fn: which leaves are made sparse; it sees the shape and dtype of a single layer.
      stacked: number of leading axes over layers, which count as layers of their own.
      er_axes: input and output axis of a layer for "er". The default is flax's and haiku's order;
        (1, 0) is that of equinox.

    Returns:
      The density tree: floats, numpy arrays for stacked layers, None for leaves not selected.

    Raises:
      ValueError: the density is out of range, the method unknown, or nothing is selected.

    Reference:
      ERK: Evci et al., "Rigging the Lottery", ICML 2020 (arXiv 1911.11134). ER: Mocanu et al.,
      Nature Communications 9 (2018).
    """
    check_density(density)
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {get_args(Method)}")
    selected, leaves, treedef = select(params, filter_fn, stacked)
    leads = {index: leaf.shape[: stacked(name, leaf)] for index, (name, leaf) in selected.items()}
    sizes = [math.prod(lead) for lead in leads.values()]
    names, shapes = [], []
    for (index, (name, leaf)), repeats in zip(selected.items(), sizes, strict=True):
        names += [name] * repeats
        shapes += [leaf.shape[len(leads[index]) :]] * repeats

    if method.startswith("uniform"):
        flat = np.full(len(shapes), float(density))
    else:
        flat = _saturating(density, shapes, method, er_axes)
    if method == "uniform_skip":
        order = sorted(range(len(names)), key=lambda i: _natural(names[i]))
        flat[[order[0], order[-1]]] = 1.0

    densities: list[Any] = [None] * len(leaves)
    for (index, lead), part in zip(leads.items(), np.split(flat, np.cumsum(sizes)), strict=False):
        densities[index] = part.reshape(lead) if lead else float(part[0])
    return jax.tree.unflatten(treedef, densities)


def check_density(density: float) -> None:
    """Raises a ValueError unless a total density is in (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; expected a number in (0, 1]")


def select(params: PyTree, filter_fn: Filter, stacked: Stacked) -> tuple[dict, list, Any]:
    """The leaves to make sparse: {index: (name, leaf)}; and all leaves, and their tree.

    Raises:
      ValueError: there is none.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    selected = {}
    for index, (path, leaf) in enumerate(leaves):
        name = path_name(path)
        layer = jax.ShapeDtypeStruct(leaf.shape[stacked(name, leaf) :], leaf.dtype)
        if math.prod(leaf.shape) and filter_fn(name, layer):
            selected[index] = (name, leaf)
    if not selected:
        raise ValueError("filter_fn selects no leaf of params: there is nothing to make sparse")
    return selected, [leaf for _, leaf in leaves], treedef


def _saturating(density, shapes, method, er_axes):
    """min(1, eps raw), with eps such that the total is the one asked for."""
    sizes = np.array([math.prod(shape) for shape in shapes], np.float64)
    if method == "balanced":
        raw = 1 / sizes
    else:
        if method == "er":
            shapes = [[shape[axis] for axis in er_axes] for shape in shapes]
        raw = np.array([sum(shape) / math.prod(shape) for shape in shapes])
    full = np.zeros(len(shapes), bool)
    while not full.all():
        eps = (density * sizes.sum() - sizes[full].sum()) / (raw * sizes)[~full].sum()
        # What a layer cannot take goes to the others, which may fill them in turn.
        over = ~full & (eps * raw > 1)
        if not over.any():
            break
        full |= over
    return np.where(full, 1.0, eps * raw)


def _natural(name):
    """A key that sorts numbers in names as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
