"""The arms of an experiment: the method, its baselines and ablations, each in its own folder."""

import fnmatch
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from icmljax.experiments.common.app import Context
from icmljax.training import workdir

Result = dict[str, Any]


def run_arms(
    context: Context[Any], arms: Mapping[str, Callable[[pathlib.Path], Result]]
) -> dict[str, Result]:
    """Runs the arms that ``--arms`` selects, in order; call it once per experiment.

    Args:
      context: of the run.
      arms: by name, the function that runs the arm: it gets the arm's folder and returns what the
        report needs, as JSON data. Names may hold slashes (``"digits/adam"``).

    Returns:
      The results by name, in the order of ``arms``: of the arms run now and, on ``--resume``, of
      all that had finished before.

    Raises:
      ValueError: a pattern of ``--arms`` matches nothing.
    """
    selected = select_arms(context.arms, arms)
    finished = [name for name in arms if context.resume and _summary(context, name).exists()]
    if jax.process_count() > 1:
        # Nobody may write a summary before everybody has looked which ones there are.
        multihost_utils.sync_global_devices("run_arms")

    results = {}
    for name, arm in arms.items():
        summary = _summary(context, name)
        if name in finished:
            results[name] = workdir.read_json(summary)
        elif name in selected:
            summary.parent.mkdir(parents=True, exist_ok=True)
            results[name] = arm(summary.parent)
            if jax.process_index() == 0:
                workdir.write_json(summary, results[name])
    return results


def select_arms(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that any of the patterns of ``--arms`` matches, in order; all without patterns.

    Raises:
      ValueError: a pattern matches nothing.
    """
    patterns, names = list(patterns), list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--arms: no arm {pattern!r}; there are: {', '.join(names)}")
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _summary(context: Context[Any], name: str) -> pathlib.Path:
    return context.arm(name) / "summary.json"
