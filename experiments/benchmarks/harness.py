"""Measured ratios: things timed in one run and in turns, so that a busy machine hits all alike.

A benchmark is a mapping from names to functions that do one unit of work and return when it is done
(they block until the arrays are ready; state that a real loop would donate is donated inside)::

    timings = harness.compare({"mada": step_mada, "adam": step_adam}, rounds=50)
    rows, verdicts = harness.rows(timings, clock="cpu", bars=[harness.Bar("mada", "adam", 6.0)])

The cost of a thing is the *smallest* time of all rounds: noise only adds. CPU time, of all threads
of the process, ignores other processes' share of the machine; wall time does not.
"""

import argparse
import concurrent.futures
import importlib.util
import math
import multiprocessing
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from icmljax.experiments.common.report import Verdict

Clock = Literal["cpu", "wall"]
Result = TypeVar("Result")


class Timing(NamedTuple):
    """Seconds that one call took.

    Attributes:
      cpu: CPU time of the process in each round, (rounds,).
      wall: wall time in each round, (rounds,).
      first: wall time of the very first call: compilation and one run.
    """

    cpu: np.ndarray
    wall: np.ndarray
    first: float


class Bar(NamedTuple):
    """A claim: ``time(case) <= limit * time(peer)``.

    Attributes:
      case: name of what is judged.
      peer: name of what it is compared with.
      limit: the largest ratio that passes; None only shows the ratio.
    """

    case: str
    peer: str
    limit: float | None = None


def compare(
    cases: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 2
) -> dict[str, Timing]:
    """Times functions in turns: A B C, A B C, ...

    Args:
      cases: by name, a function that does one unit of work and returns when it is done.
      rounds: how often each is timed, at least once.
      warmup: untimed calls of each after its first one.

    Returns:
      The timings by name.

    Raises:
      ValueError: no cases, or no rounds.
    """
    if not cases or rounds < 1:
        raise ValueError(f"got {len(cases)} cases and {rounds} rounds, expected at least one each")
    first = {name: _timed(case)[1] for name, case in cases.items()}
    for _ in range(warmup):
        for case in cases.values():
            case()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seconds[name].append(_timed(case))
    timings = {}
    for name, pairs in seconds.items():
        cpu, wall = np.transpose(pairs)
        timings[name] = Timing(cpu, wall, first[name])
    return timings


def _timed(case: Callable[[], Any]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    case()
    return time.process_time() - cpu, time.perf_counter() - wall


def ratio(timings: Mapping[str, Timing], case: str, peer: str, clock: Clock = "cpu") -> float:
    """Smallest time of ``case`` divided by that of ``peer``."""
    return float(getattr(timings[case], clock).min() / getattr(timings[peer], clock).min())


def rows(
    timings: Mapping[str, Timing], *, clock: Clock, bars: Iterable[Bar] = ()
) -> tuple[list[dict[str, Any]], list[Verdict]]:
    """What `report.table` prints of a comparison, and the verdicts on its bars.

    Args:
      timings: of `compare`.
      clock: which time the ratios are of.
      bars: at most one per case; a case without one shows no ratio.

    Returns:
      One row per case (times in milliseconds; beside the ratio of smallest times, the median of the
      ratios in each round), and one verdict per bar with a limit.
    """
    by_case = {bar.case: bar for bar in bars}
    table, verdicts = [], []
    for name, timing in timings.items():
        row: dict[str, Any] = {
            "case": name,
            "CPU ms (min)": 1e3 * timing.cpu.min(),
            "CPU ms (median)": 1e3 * np.median(timing.cpu),
            "wall ms (min)": 1e3 * timing.wall.min(),
            "wall ms (median)": 1e3 * np.median(timing.wall),
            "first call s": timing.first,
        }
        if bar := by_case.get(name):
            peer = timings[bar.peer]
            measured = ratio(timings, name, bar.peer, clock)
            paired = np.median(getattr(timing, clock) / getattr(peer, clock))
            row |= {"ratio": measured, "paired": paired, "to": f"{bar.peer} ({clock})"}
            if bar.limit is not None:
                passed = measured <= bar.limit
                row |= {"bar": f"<= {bar.limit:.4g}", "": "PASS" if passed else "FAIL"}
                claim = f"{clock} time of {name} <= {bar.limit:.4g} x {bar.peer}"
                verdicts.append(Verdict(claim, f"{measured:.3f} x", passed))
        table.append(row)
    return table, verdicts


def as_json(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """The timings as JSON data, every round included."""
    return {
        name: {
            "cpu_s": timing.cpu.tolist(),
            "wall_s": timing.wall.tolist(),
            "first_s": timing.first,
        }
        for name, timing in timings.items()
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on; starts the back end."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": os.environ.get("NPROC", "all"),
        "device": f"{device.platform}: {device.device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan,
    }


def machine_line(description: Mapping[str, Any]) -> str:
    """`machine` in one line."""
    return ", ".join(
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in description.items()
    )


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def run(
    name: str,
    description: str,
    main: Callable[..., int | None],
    **options: tuple[pathlib.Path, str],
) -> None:
    """Runs a benchmark script; never returns.

    Args:
      name: of the benchmark.
      description: what `--help` says.
      main: gets the folder to write to, which exists, and the options by name; returns the exit
        status (None: 0).
      **options: further paths; default and help of each.
    """
    # No absl flags: the scripts would define the same one twice where a test imports several.
    parser = argparse.ArgumentParser(
        f"python -m experiments.benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs", "benchmarks", name),
        help="folder for the tables and summary.json, overwritten; default: %(default)s",
    )
    for option, (default, text) in options.items():
        text = f"{text}; default: %(default)s"
        parser.add_argument(f"--{option}", type=pathlib.Path, default=default, help=text)
    arguments = vars(parser.parse_args())
    directory = arguments.pop("workdir")
    if importlib.util.find_spec("rich") is None:
        parser.exit(1, "error: rich is not installed; pip install 'icmljax[experiments]'\n")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"error: {error}; give another --workdir\n")
    sys.exit(main(directory, **arguments))


def in_new_process(
    function: Callable[..., Result], *arguments: Any, one_thread: bool = False
) -> Result:
    """Calls a function of a module in a fresh process, where the back end has not started yet.

    Args:
      function: as `pickle` can find it: at the top of its module.
      *arguments: of the function.
      one_thread: XLA computes on the CPU with a single thread. It reads that from the environment
        when the back end starts, and so this cannot be changed in a process that computed already.

    Returns:
      What the function returns.
    """
    environment = {}
    if one_thread:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        environment = {"XLA_FLAGS": flags.strip(), "NPROC": "1"}
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_set_environment,
        initargs=(environment,),
    ) as executor:
        return executor.submit(function, *arguments).result()


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
