"""Scalars of a step, of which Python numbers stay static wherever they travel."""

import functools
from typing import Any, NamedTuple

import jax


class Skeleton(NamedTuple):
    """A tree with its Python numbers in place and holes for its traced leaves; hashable."""

    treedef: Any
    numbers: tuple

    def merge(self, traced):
        """The tree, with these leaves in the holes."""
        rest = iter(traced)
        return jax.tree.unflatten(
            self.treedef, [next(rest) if x is None else x for x in self.numbers]
        )


def split_static(tree):
    """The traced leaves of a tree, and the skeleton that holds its Python numbers."""
    flat, treedef = jax.tree.flatten(tree)
    numbers = tuple(x if isinstance(x, (int, float)) else None for x in flat)
    traced = [x for x, number in zip(flat, numbers, strict=True) if number is None]
    return traced, Skeleton(treedef, numbers)


def run_worker(worker, scalars, leaf, *static):
    """worker(scalars, leaf, *static), traced once for all leaves of one shape."""
    traced, skeleton = split_static(scalars)
    return _traced_once(worker, skeleton, static, traced, leaf)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _traced_once(worker, skeleton, static, traced, leaf):
    return worker(skeleton.merge(traced), leaf, *static)
