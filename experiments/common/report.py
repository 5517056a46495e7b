"""What an experiment ends with: statistics, tables, plots, the verdict and ``summary.json``.

In a run of several processes only process 0 prints and writes.
"""

import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from icmljax.training import workdir


class Verdict(NamedTuple):
    """One claim against its bar."""

    bar: str  # "MADA train loss <= 0.75 x HyperAdam"
    measured: str  # "0.61, 95% in [0.58, 0.64]"
    passed: bool


class Curve(NamedTuple):
    """A line of a plot."""

    steps: ArrayLike  # (rows,)
    values: ArrayLike  # (rows,) or (rows, seeds): drawn as mean and standard error


def mean_and_standard_error(values: ArrayLike) -> tuple[float, float]:
    """The mean over all values and its standard error (NaN for a single value)."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    if flat.size == 0:
        raise ValueError("got no values to average, expected at least one")
    error = flat.std(ddof=1) / math.sqrt(flat.size) if flat.size > 1 else math.nan
    return float(flat.mean()), float(error)


def difference_of_means(a: np.ndarray, b: np.ndarray) -> float:
    """``mean(a) - mean(b)``."""
    return float(a.mean() - b.mean())


def ratio_of_means(a: np.ndarray, b: np.ndarray) -> float:
    """``mean(a) / mean(b)``."""
    return float(a.mean() / b.mean())


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    *,
    statistic: Callable[[np.ndarray, np.ndarray], float] = difference_of_means,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """A statistic of paired measurements with its percentile bootstrap interval.

    Args:
      a: measurements, (pairs, ...); whole rows are resampled, the same ones in ``a`` and ``b``.
      b: the measurements they are paired with, (pairs, ...).
      statistic: of ``a`` and ``b``.
      num_resamples: how often the pairs are drawn anew.
      confidence: of the interval, in (0, 1).
      seed: of the draws.

    Returns:
      The estimate and both ends of the interval.

    Raises:
      ValueError: a different number of pairs, or none.

    Reference:
      B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.ndim == 0 or b.ndim == 0 or len(a) != len(b) or len(a) == 0:
        raise ValueError(f"got shapes {a.shape} and {b.shape}, expected the same number of pairs")
    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(a), size=len(a)) for _ in range(num_resamples))
    resampled = [statistic(a[rows], b[rows]) for rows in draws]
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(statistic(a, b)), float(low), float(high)


def table(
    rows: Sequence[Mapping[str, Any]], *, title: str = "", path: str | os.PathLike | None = None
) -> None:
    """Prints a table, and writes it as Markdown.

    Args:
      rows: column name to value; a pair of floats is mean and standard error, other floats get four
        digits, a missing value stays empty.
      title: printed above.
      path: of the Markdown file; None writes none.
    """
    import rich.box
    import rich.console
    import rich.table

    if jax.process_index() != 0:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]

    drawn = rich.table.Table(title=title or None, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        drawn.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for line in cells:
        drawn.add_row(*line)
    # A pipe or a log file has no width that a table would have to be folded to.
    width = None if sys.stdout.isatty() else 200
    rich.console.Console(width=width, markup=False, highlight=False).print(drawn)

    if path is not None:
        lines = [f"**{title}**", ""] if title else []
        for line in [columns, ["---"] + ["---:"] * (len(columns) - 1), *cells]:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        pathlib.Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(
    path: str | os.PathLike,
    panels: Mapping[str, Mapping[str, Curve]],
    *,
    title: str = "",
    xlabel: str = "step",
    log_y: bool = False,
) -> None:
    """Draws curves with bands of one standard error, one panel beside the other, into a PNG.

    Args:
      path: of the PNG.
      panels: what a panel shows (its y-axis), to its curves by arm; an arm has one colour in all.
      title: above all panels.
      xlabel: below each panel.
      log_y: logarithmic y-axis.
    """
    # The figure is made without pyplot: no display is needed, no state of the process is changed.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if jax.process_index() != 0:
        return
    num_columns = min(3, max(1, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    figure = Figure(figsize=(5 * num_columns, 3.6 * num_rows), dpi=120, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    arms = list(dict.fromkeys(arm for curves in panels.values() for arm in curves))
    palette = colormaps["tab10" if len(arms) <= 10 else "tab20"]
    colors = {arm: palette(index % palette.N) for index, arm in enumerate(arms)}

    handles = {}
    for ax, (ylabel, curves) in zip(axes, panels.items(), strict=False):
        for arm, curve in curves.items():
            values = np.asarray(curve.values, dtype=np.float64)
            seeds = values.reshape(len(values), -1)
            mean = seeds.mean(axis=1)
            (handles[arm],) = ax.plot(curve.steps, mean, color=colors[arm], linewidth=1.2)
            if seeds.shape[1] > 1:
                error = seeds.std(axis=1, ddof=1) / math.sqrt(seeds.shape[1])
                ax.fill_between(
                    np.asarray(curve.steps),
                    mean - error,
                    mean + error,
                    color=colors[arm],
                    alpha=0.2,
                    linewidth=0,
                )
        ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log_y else "linear")
        ax.grid(alpha=0.3)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def conclude(
    directory: str | os.PathLike,
    *,
    results: Mapping[str, Any],
    verdicts: Sequence[Verdict] = (),
    files: Iterable[str | os.PathLike] = (),
) -> None:
    """Prints the verdict on each bar and where things are; writes ``summary.json``.

    Args:
      directory: the workdir.
      results: what was measured, as JSON data.
      verdicts: the claims against their bars.
      files: tables and plots, to be named at the end.
    """
    if jax.process_index() != 0:
        return
    if not verdicts:
        print("no verdict: the runs are too short, or too few, for any of the bars")
    for verdict in verdicts:
        print(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.bar}: {verdict.measured}")
    summary = pathlib.Path(directory) / "summary.json"
    checked = [
        {"bar": verdict.bar, "measured": verdict.measured, "passed": bool(verdict.passed)}
        for verdict in verdicts
    ]
    workdir.write_json(summary, {"results": dict(results), "verdicts": checked})
    for file in [*files, summary]:
        print(file)


def _cell(value: Any) -> str:
    match value:
        case (float() as mean, float() as error):
            return f"{mean:.4g}" if math.isnan(error) else f"{mean:.4g} ± {error:.2g}"
        case float() | np.floating():
            return f"{value:.4g}"
        case _:
            return str(value)
