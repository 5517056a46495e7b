"""Initialisation of whole networks: any pytree of parameters, of any library."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from icmljax.initializers.eoi.initializers import (
    Layout,
    MaskedInitializer,
    delta_orthogonal_with_mask,
    read_shape,
    smallest_density,
)
from icmljax.sparsity.masks import as_masks, map_named

Factory = Callable[..., MaskedInitializer]
LayoutOf = Callable[[str, Any], Layout]

_BIASES = ("bias", "b")


def channels_last(path: str, leaf: Any) -> Layout:
    """The layout of flax and haiku: matrices (in, out), kernels (height, width, in, out).

    Raises:
      ValueError: the leaf is neither a matrix nor the kernel of a 2-D convolution.
    """
    _expect_two_or_four(path, leaf)
    return Layout()


def channels_first(path: str, leaf: Any) -> Layout:
    """The layout of equinox and PyTorch: (out, in), (out, in, height, width).

    Raises:
      ValueError: the leaf is neither a matrix nor the kernel of a 2-D convolution.
    """
    _expect_two_or_four(path, leaf)
    return Layout(in_axis=1, out_axis=0)


def _expect_two_or_four(path: str, leaf: Any) -> None:
    if len(leaf.shape) not in (2, 4):
        raise ValueError(
            f"parameter {path!r} has shape {tuple(leaf.shape)}, expected 2 or 4 axes; for stacked"
            " layers, grouped or 1-D convolutions, projections to heads give a layout_of that"
            " tells what its axes are"
        )


class _Drawn(NamedTuple):
    weights: Any
    mask: Any


def reinit_tree(
    key: PRNGKeyArray,
    params: PyTree,
    densities: PyTree,
    sigma_w: float = 1.0,
    sigma_b: float = 0.0,
    *,
    layout_of: LayoutOf = channels_last,
    factory: Factory = delta_orthogonal_with_mask,
) -> tuple[PyTree, PyTree]:
    """Draws the weights and biases of a network anew.

    Args:
      key: PRNG key.
      params: tree of arrays, as flax (linen or nnx), haiku or equinox keep it.
      densities: the same tree with a density for each weight to draw (an array for stacked layers,
        see `delta_orthogonal_with_mask`), None elsewhere: `icmljax.sparsity.densities` makes such
        trees, or measures those of masks.
      sigma_w: gain of the weights.
      sigma_b: standard deviation of the biases (leaves named "bias" or "b"). 1.0247 and 0.00448
        for deep tanh networks, 1 and 0 for shallow and for ReLU networks, in the paper.
      layout_of: ``(path, leaf) -> Layout`` of a weight; paths are joined by "/".
      factory: of the initializers, called with density, gain and the fields of the layout;
        `functools.partial` sets its options.

    Returns:
      The parameters, with all other leaves as they were, and the tree of their masks: arrays of
      bool for the weights drawn, scalars (True) for everything else.

    Raises:
      ValueError: the trees differ, or a density cannot be had; names the parameter.
    """
    keys = iter(jax.random.split(key, 1 + len(jax.tree.leaves(params))))

    def draw(name, leaf, density):
        own_key = next(keys)
        if density is not None:
            layout = dataclasses.asdict(layout_of(name, leaf))
            try:
                return _Drawn(*factory(density, sigma_w, **layout)(own_key, leaf.shape, leaf.dtype))
            except ValueError as error:
                raise ValueError(f"parameter {name!r}: {error}") from error
        if _is_bias(name):
            leaf = sigma_b * jax.random.normal(own_key, leaf.shape, leaf.dtype)
        return _Drawn(leaf, jnp.array(True))

    drawn = map_named(draw, params, densities, "densities")

    def part(index):
        return jax.tree.map(lambda x: x[index], drawn, is_leaf=lambda x: isinstance(x, _Drawn))

    return part(0), part(1)


def _is_bias(name: str) -> bool:
    # flax.nnx keeps a parameter's array one level down, as "value".
    return name.removesuffix("/value").rpartition("/")[2] in _BIASES


def feasible_densities(
    params: PyTree, densities: PyTree, *, layout_of: LayoutOf = channels_last
) -> PyTree:
    """The nearest densities that orthogonal layers can have, with the same total.

    Layers that would be too sparse get the smallest possible density; the others are scaled down by
    a common factor.

    Args:
      params: tree of parameters (or of their shapes).
      densities: see `reinit_tree`.
      layout_of: see `reinit_tree`.

    Raises:
      ValueError: the trees differ, or even the smallest densities are more than the total.
    """
    asked: list[Any] = []
    smallest, sizes = [], []

    def collect(name, leaf, density):
        if density is None:
            return None
        shape = np.shape(density)
        asked.append(density)
        smallest.append(np.full(shape, smallest_density(leaf.shape, layout_of(name, leaf))))
        sizes.append(np.full(shape, math.prod(leaf.shape) / max(1, math.prod(shape))))
        return len(asked) - 1

    places = map_named(collect, params, densities, "densities")
    if not asked:
        return densities
    wanted, least, size = (
        np.concatenate([np.ravel(x) for x in y]) for y in (asked, smallest, sizes)
    )
    total = wanted @ size
    if least @ size > total * (1 + 1e-9):
        raise ValueError(
            f"orthogonal layers need {least @ size:.0f} of {size.sum():.0f} weights at least, the"
            f" densities give {total:.0f}; raise them"
        )
    lifted, factor = np.zeros(len(wanted), bool), 1.0
    while np.any(short := ~lifted & (wanted * factor < least)):
        lifted |= short
        factor = (total - least[lifted] @ size[lifted]) / (wanted[~lifted] @ size[~lifted])
    flat = np.where(lifted, least, wanted * factor)
    parts = np.split(flat, np.cumsum([np.size(x) for x in asked])[:-1])
    found = [x.reshape(np.shape(old)) for x, old in zip(parts, asked, strict=True)]
    return jax.tree.map(lambda i: found[i] if found[i].ndim else float(found[i]), places)


class LayerReport(NamedTuple):
    """What one layer came out as; of stacked layers the worst, or the extreme, of all."""

    path: str
    shape: tuple[int, ...]
    asked: float | None  # mean density asked for
    density: float  # realised, of the mask
    fewest: int  # non-zeros of the matrix (of all taps' matrix) in a row, rows = output channels
    most: int
    error: float  # largest element of |A A^T / scale^2 - I|, on the smaller side


def report(
    params: PyTree,
    masks: PyTree,
    densities: PyTree,
    sigma_w: float = 1.0,
    *,
    layout_of: LayoutOf = channels_last,
) -> tuple[LayerReport, ...]:
    """Density, spread of row counts and orthogonality of each layer; on the host.

    Args:
      params: see `reinit_tree`.
      masks: as `reinit_tree` returns them.
      densities: as asked for.
      sigma_w: gain that the layers were drawn with.
      layout_of: see `reinit_tree`.
    """
    rows: list[LayerReport] = []

    supports = iter(jax.tree.leaves(as_masks(params, masks)))

    def add(name, leaf, density):
        mask = np.broadcast_to(next(supports), leaf.shape)
        if density is None:
            return
        layout = layout_of(name, leaf)
        weights = taps(np.asarray(leaf, np.float64), layout)
        fewer_inputs = weights.shape[-2] <= weights.shape[-1]
        gram = (weights @ weights.mT if fewer_inputs else weights.mT @ weights).sum(axis=-3)
        counts = taps(mask, layout).sum(axis=(-3, -2))  # non-zeros of each output
        rows.append(
            LayerReport(
                name,
                tuple(leaf.shape),
                float(np.mean(density)),
                float(mask.mean()),
                int(counts.min()),
                int(counts.max()),
                float(np.abs(gram / sigma_w**2 - np.eye(gram.shape[-1])).max()),
            )
        )

    map_named(add, params, densities, "densities")
    return tuple(rows)


def taps(weight: Any, layout: Layout) -> Any:
    """A weight as matrices: (batch, groups, taps, in, out), in and out of one group."""
    order, _, _, block = read_shape(weight.shape, layout)
    shape = (-1, block.taps, block.fan_in, block.groups, block.fan_out)
    return weight.transpose(order).reshape(shape).transpose(0, 3, 1, 2, 4)
