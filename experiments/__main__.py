"""The console command: `icmljax list`, `icmljax run NAME [flags]`; `python -m experiments`."""

import difflib
import os
import sys

import icmljax
from icmljax.experiments.catalogue import CATALOGUE

USAGE = """\
icmljax list              the experiments
icmljax run NAME [flags]  runs one; `icmljax run NAME --help` lists its flags
icmljax --version"""


def main() -> int:
    """Runs the command in ``sys.argv``; returns the exit status."""
    match sys.argv[1:]:
        case [] | ["list"]:
            print(_listing())
        case ["run", name, *flags] if not name.startswith("-"):
            return _run(name, flags)
        case ["--version"]:
            print(icmljax.__version__)
        case ["--help" | "-h" | "help"]:
            print(USAGE)
        case arguments:
            return _fail(f"got {' '.join(arguments)!r}; see icmljax --help")
    return 0


def _listing() -> str:
    rows = [("NAME", "METHOD", "PAPER", "WHAT"), *CATALOGUE]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _run(name: str, flags: list[str]) -> int:
    names = [entry.name for entry in CATALOGUE]
    if name not in names:
        near = difflib.get_close_matches(name, names)
        hint = f"did you mean {' or '.join(near)}?" if near else "icmljax list shows all"
        return _fail(f"no experiment {name!r}; {hint}")
    # The script takes over this very process: signals and the exit status are its own.
    command = [sys.executable, "-m", f"icmljax.experiments.{name}", *flags]
    os.execv(sys.executable, command)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
