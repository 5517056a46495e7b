"""Metrics of a run: ``metrics.jsonl`` (the record) and TensorBoard event files (to look at)."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

FILE_NAME = "metrics.jsonl"


class MetricWriter:
    """Writes one row per step; only process 0 writes, in the others every method does nothing.

    ``metrics.jsonl`` has one JSON object a line, ``{"step": 10, "loss": 0.5, ...}``; the entries of
    a population are lists; a number that is not finite is ``null``. It holds no times, so that two
    runs of the same thing give the same bytes.

    Args:
      directory: made when missing.
      tensorboard: write event files too (of a population: its mean).
      resume_step: the step to continue from; rows of later steps, and a torn last one, are cut off.
        None starts a new file.

    Raises:
      FileExistsError: there are metrics already and ``resume_step`` is None.
      ImportError: tensorboardX is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        tensorboard: bool = True,
        resume_step: int | None = None,
    ):
        self._file: Any = None
        self._events: Any = None
        if jax.process_index() != 0:
            return
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        if resume_step is not None:
            _cut(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            raise FileExistsError(f"{path} exists; resume that run or choose another directory")
        if tensorboard:
            # Event files cannot be cut: purge_step tells TensorBoard to ignore what came later.
            purge_step = None if resume_step is None else resume_step + 1
            self._events = _summary_writer()(str(directory), purge_step=purge_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a row.

        Args:
          step: number of steps taken.
          metrics: scalars or 1-D arrays (one entry per member of a population) by name.
        """
        if self._file is None:
            return
        values = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
        for name, value in values.items():
            if name == "step":
                raise ValueError("a metric cannot be called 'step': that is the row's number")
            if value.ndim > 1:
                raise ValueError(
                    f"metric {name!r} has shape {value.shape}, expected a scalar or one axis"
                )
        row = {"step": int(step)} | {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, float(value.mean()), step)

    def flush(self) -> None:
        """Makes sure that everything is on disk, as a checkpoint of the same step needs it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Writes out and closes the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def read_metrics(directory: str | os.PathLike, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads one metric.

    Args:
      directory: the one that a ``MetricWriter`` wrote to.
      name: the name of the metric.

    Returns:
      The steps that have it, int64 ``(rows,)``, and its values, float64 ``(rows,)`` or
      ``(rows, members)``; a value that was not finite is NaN.

    Raises:
      FileNotFoundError: there is no ``metrics.jsonl``.
      ValueError: no row has this metric.
    """
    path = pathlib.Path(directory) / FILE_NAME
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if name in row]
    if not found:
        names = sorted(set().union(*rows) - {"step"})
        raise ValueError(f"{path} has no metric {name!r}, it has {names}")
    steps = np.array([row["step"] for row in found], np.int64)
    return steps, np.array([row[name] for row in found], np.float64)  # null becomes NaN


def _plain(value: np.ndarray) -> Any:
    """A float or a list of floats, None for what is not finite (JSON has no NaN)."""
    plain = [number if math.isfinite(number) else None for number in value.ravel().tolist()]
    return plain if value.ndim else plain[0]


def _cut(path: pathlib.Path, last_step: int) -> None:
    """Keeps the complete rows up to ``last_step``, byte by byte."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        # Rows go up in steps and only the last one can be torn: nothing after it is worth keeping.
        if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
            break
        kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard event files need tensorboardX: pip install 'icmljax[experiments]'"
        ) from error
    return SummaryWriter
