"""Runs the script of the experiment that a test module names as EXPERIMENT, in this process."""

import functools
import importlib
import importlib.util
import sys

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from icmljax.experiments.common import app, command


@pytest.fixture(scope="module")
def program(request):
    """The script as a module; its flags are taken back, other scripts may have the same."""
    before = set(absl_flags.FLAGS)
    name = f"icmljax.experiments.{request.module.EXPERIMENT}"
    package = importlib.util.find_spec(name).submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if package else name)
    yield module
    for name in set(absl_flags.FLAGS) - before:
        delattr(absl_flags.FLAGS, name)
    del sys.modules[module.__name__]


@pytest.fixture
def run_script(program, request, monkeypatch, capsys):
    """Runs the script: ``flags -> (exit status, stdout, stderr)``."""

    def run(*flags):
        if hasattr(program, "PRESETS"):
            script = functools.partial(
                app.run, request.module.EXPERIMENT, program.PRESETS, program.main
            )
            flags = (*flags, "--noprogress")
        else:
            script = functools.partial(command.run, program.main)
        monkeypatch.setattr(sys, "argv", [program.__name__, *flags])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit_:
            script()
        return exit_.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def fails(run_script):
    """Runs the script; it has to end with one line that holds the message."""

    def run(message, *flags):
        status, out, err = run_script(*flags)
        assert (status, out) == (1, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        assert message in err

    return run
