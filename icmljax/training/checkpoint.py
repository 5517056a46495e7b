"""Checkpoints: asynchronous, atomic, the last few and the best, with data iterator and PRNG inside.

A step on disk is an orbax checkpoint of two items:

- ``state``: a flat dict from a leaf's path in the state (``.params['dense']['kernel']``) to its
  array. Being flat it holds any pytree: static nodes, ``None`` and tuples live in the tree of the
  state that is restored into, not on disk.
- ``meta``: a JSON object with the format version, the identity of the run, the shape and dtype of
  every leaf, the state of the data iterator, and the metric that decides which step is the best.
"""

import contextlib
import math
import os
import sys
import types
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import PyTree

FORMAT_VERSION = 1


class Checkpoints:
    """The checkpoints of one run in one directory; every process of the run takes part.

    Args:
      directory: made when missing.
      identity: what must be equal between a run and the checkpoints it resumes from, for example
        ``{"experiment": "mada", "arm": "adam"}``.
      keep: how many of the latest steps stay.
      best_metric: name of a metric; the step where it was lowest stays as well.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        identity: Mapping[str, str],
        keep: int = 2,
        best_metric: str | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = os.path.abspath(directory)
        self._identity = dict(identity)
        self._best_metric = best_metric
        self._keep = keep
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=types.SimpleNamespace(should_preserve=self._should_preserve),
                cleanup_tmp_directories=True,
            ),
        )
        # The measured values live in our own item: a damaged one in orbax's would stop it starting.
        self._measured: dict[int, float] = {}
        for step in self._manager.all_steps() if best_metric is not None else []:
            meta, _ = _attempt(self._read_meta, step)
            if meta is not None and best_metric in meta["metrics"]:
                self._measured[step] = meta["metrics"][best_metric]

    def latest_step(self) -> int | None:
        """The latest saved step, or None."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: PyTree,
        data_state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save; returns when the state may be donated. An earlier failure is raised here.

        Args:
          step: number of steps taken.
          state: any pytree of arrays (typed PRNG keys too).
          data_state: JSON data that restores the data iterator.
          metrics: what was measured of this very state, if anything was; of a population the mean
            counts as ``best_metric``.
        """
        measured = {}
        if metrics and self._best_metric is not None:
            if self._best_metric not in metrics:
                raise ValueError(
                    f"best_metric {self._best_metric!r} is not among the metrics {sorted(metrics)}"
                )
            measured[self._best_metric] = float(np.mean(metrics[self._best_metric]))
            self._measured[step] = measured[self._best_metric]
        leaves = _named_leaves(state)
        meta = {
            "format_version": FORMAT_VERSION,
            "identity": self._identity,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "data_state": dict(data_state),
            "metrics": measured,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_storable(leaves)), meta=ocp.args.JsonSave(meta)
            ),
            force=True,
        )

    def restore(
        self, abstract_state: PyTree, *, best: bool = False
    ) -> tuple[PyTree, dict[str, Any], int] | None:
        """Restores the latest step that is whole.

        Args:
          abstract_state: arrays or ``jax.ShapeDtypeStruct``s whose shapes, dtypes and shardings the
            restored state gets; the mesh may differ from the one that was saved on.
          best: restore the step with the lowest ``best_metric`` instead of the latest.

        Returns:
          ``(state, data_state, step)``, or None when nothing was saved yet.

        Raises:
          ValueError: the checkpoint is of another run, format or shape, or all steps are damaged.
        """
        leaves = _named_leaves(abstract_state)
        steps = sorted(self._manager.all_steps(), reverse=True)
        if best:
            steps = self._best_of(steps)
        damaged: dict[int, str] = {}
        with _ignoring_abandoned_reads():
            for step in steps:
                meta, error = _attempt(self._read_meta, step)
                if error is None:
                    self._check(step, meta, leaves)
                    arrays, error = _attempt(self._read_state, step, leaves)
                if error is not None:
                    damaged[step] = error
                    continue
                if damaged:
                    self._set_aside(damaged, step)
                structure = jax.tree.structure(abstract_state)
                return jax.tree.unflatten(structure, arrays.values()), meta["data_state"], step
        if damaged:
            raise ValueError(
                f"every checkpoint in {self.directory} is damaged ({_listed(damaged)}); "
                "choose another directory, or remove this one to start afresh"
            )
        return None

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is on disk and lets go of the directory."""
        self._manager.close()

    def _should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """An orbax ``PreservationPolicy``: the last few and the best stay."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._keep :], *self._best_of(steps)}
        return [step in kept for step in steps]

    def _best_of(self, steps: Sequence[int]) -> list[int]:
        """The best step (of equals the latest), or nothing when nothing was measured."""
        values = {step: self._measured[step] for step in steps if step in self._measured}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return [min(finite, key=lambda step: (values[step], -step))] if finite else []

    def _read_meta(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self._manager.restore(step, args=args)["meta"]
        for name in ("format_version", "identity", "leaves", "data_state", "metrics"):
            meta[name]  # a KeyError here is damage like any other
        return meta

    def _read_state(self, step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        target = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
            for name, leaf in _storable(leaves).items()
        }
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        stored = self._manager.restore(step, args=args)["state"]
        return {name: stored[name] if name in stored else _empty(leaves[name]) for name in leaves}

    def _check(self, step: int, meta: dict[str, Any], leaves: dict[str, Any]) -> None:
        """Compares before anything is restored: orbax would silently cast a wrong dtype."""
        where = f"the checkpoint of step {step} in {self.directory}"
        if meta["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{where} has format version {meta['format_version']}, expected {FORMAT_VERSION}; "
                "restore it with the version of icmljax that wrote it"
            )
        if meta["identity"] != self._identity:
            raise ValueError(
                f"{where} belongs to {meta['identity']}, expected {self._identity}; "
                "choose another directory"
            )
        got, expected = meta["leaves"], {n: _describe(leaf) for n, leaf in leaves.items()}
        if got == expected:
            return
        problems = [
            f"{name}: got {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
            for name in expected | got
            if got.get(name) != expected.get(name)
        ]
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{where} does not fit the state to restore: {'; '.join(problems[:5])}{more}; "
            "use the configuration it was saved with, or another directory"
        )

    def _set_aside(self, damaged: dict[int, str], step: int) -> None:
        """Renames the damaged steps, which would block their numbers and displace whole ones."""
        logging.warning(
            "checkpoints in %s are damaged (%s) and set aside as NUMBER.damaged; "
            "falling back to step %d",
            self.directory,
            _listed(damaged),
            step,
        )
        if jax.process_index() == 0:
            for number in damaged:
                path = os.path.join(self.directory, str(number))
                aside, copies = f"{path}.damaged", 1
                while os.path.exists(aside):
                    copies += 1
                    aside = f"{path}.damaged{copies}"
                os.rename(path, aside)
        multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Path to leaf, in the order of ``jax.tree.leaves``."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _storable(leaves: dict[str, Any]) -> dict[str, Any]:
    """Without arrays of size zero, which orbax refuses to write."""
    return {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape) > 0}


def _empty(leaf: Any) -> jax.Array:
    return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), getattr(leaf, "sharding", None))


def _describe(leaf: Any) -> str:
    """``float32[8,64]``."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _listed(damaged: dict[int, str]) -> str:
    return "; ".join(f"step {step}: {error}" for step, error in damaged.items())


@contextlib.contextmanager
def _ignoring_abandoned_reads() -> Generator[None, None, None]:
    """When one read fails, orbax drops the others, and each of them would print a traceback."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _attempt(function: Any, *args: Any) -> tuple[Any, str | None]:
    """``(result, None)``, or ``(None, reason)`` when it failed in any process of the run."""
    result, error = None, None
    try:
        result = function(*args)
    except Exception as exception:  # damaged files raise errors of any type
        lines = str(exception).strip().splitlines() or [""]
        error = f"{type(exception).__name__}: {lines[0][:120]}"
    failed = multihost_utils.process_allgather(np.asarray(error is not None))
    if np.any(failed):
        return None, error or "another process could not read it"
    return result, None
