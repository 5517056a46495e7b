"""The folder of a run: who may use it, and ``run.json``, the record of what ran there."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

FORMAT_VERSION = 1
RECORD = "run.json"
_PACKAGES = ("icmljax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def prepare(
    workdir: str | os.PathLike,
    *,
    experiment: str,
    flags: Mapping[str, Any],
    resume: bool,
) -> pathlib.Path:
    """Makes the folder of a run, or checks that this run may continue in it.

    Process 0 does the work; in a run of several processes all of them must call this.

    Args:
      workdir: the folder; it must be empty unless ``resume``.
      experiment: name of the experiment.
      flags: the settings that change results, as JSON data. Those that do not (progress bar,
        profiling, the mesh) stay out: a resumed run may change them.
      resume: continue what is there; an empty folder is a fresh start.

    Returns:
      The absolute path of the folder.

    Raises:
      FileExistsError: not empty, and not ``resume``.
      ValueError: not writable, not the folder of a run, or of a run with another experiment or
        other flags.
      RuntimeError: process 0 could not prepare it (raised in the other processes).
    """
    path = pathlib.Path(workdir).absolute()
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            _prepare(path, experiment, json.loads(json.dumps(dict(flags))), resume)
        except (OSError, ValueError) as exception:
            error = exception
    # Everybody learns how it went: a process that waited for a dead one would be aborted in C++.
    failed = multihost_utils.broadcast_one_to_all(np.asarray(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"process 0 could not prepare the workdir {path}; see its message")
    return path


def discard_unused(workdir: str | os.PathLike) -> None:
    """Removes the record of a run that failed before it wrote anything else.

    So the run can be started again in the same folder, with the flag that was wrong put right.
    """
    path = pathlib.Path(workdir)
    if jax.process_index() == 0 and [entry.name for entry in path.iterdir()] == [RECORD]:
        (path / RECORD).unlink()


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes JSON atomically: a reader finds the old file or the whole new one."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(obj, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON.
    """
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it may have been cut off") from error


def _prepare(path: pathlib.Path, experiment: str, flags: dict[str, Any], resume: bool) -> None:
    record_path = path / RECORD
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "writable.tmp").touch()
        (path / "writable.tmp").unlink()
    except OSError as error:
        raise ValueError(
            f"the workdir {path} cannot be written ({error.strerror}); choose another one"
        ) from error
    if record_path.exists() and resume:
        record = read_json(record_path)
        _check(path, record, experiment, flags)
        record["resumed"].append(_circumstances())
        write_json(record_path, record)
        return
    # A run killed while it wrote its record leaves only a *.tmp: still as good as empty.
    entries = sorted(entry.name for entry in path.iterdir() if entry.suffix != ".tmp")
    if entries and resume:
        raise ValueError(
            f"the workdir {path} has no {RECORD}, so there is no run to resume (it holds "
            f"{', '.join(entries[:5])}); choose another one"
        )
    if entries:
        raise FileExistsError(
            f"the workdir {path} is not empty (it holds {', '.join(entries[:5])}); "
            "resume that run with --resume, or choose another one"
        )
    record = {"format_version": FORMAT_VERSION, "experiment": experiment, "flags": flags}
    write_json(record_path, record | _circumstances() | {"resumed": []})


def _check(
    path: pathlib.Path, record: dict[str, Any], experiment: str, flags: dict[str, Any]
) -> None:
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path / RECORD} has format version {record.get('format_version')}, expected "
            f"{FORMAT_VERSION}; resume it with the version of icmljax that started it"
        )
    if record["experiment"] != experiment:
        raise ValueError(
            f"the workdir {path} belongs to the experiment {record['experiment']!r}, expected "
            f"{experiment!r}; choose another one"
        )
    before, unset = record["flags"], "not set"
    changed = [
        f"{name} was {before.get(name, unset)!r}, now {flags.get(name, unset)!r}"
        for name in sorted(before.keys() | flags.keys())
        if before.get(name, unset) != flags.get(name, unset)
    ]
    if changed:
        raise ValueError(
            f"the run in {path} was started with other flags: {'; '.join(changed)}; "
            "resume it with the same ones, or choose another workdir"
        )


def _circumstances() -> dict[str, Any]:
    """What does not decide whether a run may be resumed, but explains its results."""
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
    }


def _commit() -> str:
    """The commit of the checkout that this file is tracked in, "-dirty" when changed since."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", pathlib.Path(__file__).name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        for command in (tracked, describe):
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
