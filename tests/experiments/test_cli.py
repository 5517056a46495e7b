"""The console command and the catalogue."""

import pathlib
import subprocess
import sys

import pytest

import icmljax
from icmljax.experiments import __main__ as cli
from icmljax.experiments.catalogue import CATALOGUE

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def run_cli(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["icmljax", *arguments])
        return cli.main(), *capsys.readouterr()

    return run


def test_catalogue_holds_every_script():
    folder = ROOT / "experiments"
    scripts = {path.stem for path in folder.glob("*.py")}
    scripts |= {path.parent.name for path in folder.glob("*/__main__.py")}
    names = [entry.name for entry in CATALOGUE]
    assert set(names) == scripts - {"__init__", "__main__", "catalogue"}
    assert len(set(names)) == len(names)


def test_modules_list_the_catalogue_without_importing_jax():
    for module in ("experiments", "icmljax.experiments"):
        # -X importtime names every module that is imported.
        command = [sys.executable, "-X", "importtime", "-m", module]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        header, *lines = done.stdout.splitlines()
        assert header.split() == ["NAME", "METHOD", "PAPER", "WHAT"]
        assert [line.split()[0] for line in lines] == [entry.name for entry in CATALOGUE]
        assert "icmljax.experiments.catalogue" in done.stderr
        assert " jax\n" not in done.stderr


def test_list_version_and_help(run_cli):
    assert run_cli() == run_cli("list")
    assert run_cli("--version") == (0, f"{icmljax.__version__}\n", "")
    assert run_cli("--help")[1].startswith("icmljax list")


def test_run_hands_over_to_the_script(run_cli, monkeypatch):
    class Replaced(Exception):
        pass

    def execv(*arguments):
        raise Replaced(*arguments)

    monkeypatch.setattr(cli.os, "execv", execv)
    with pytest.raises(Replaced) as replaced:
        run_cli("run", "mada", "--preset=smoke", "--seeds=2")
    command = [sys.executable, "-m", "icmljax.experiments.mada", "--preset=smoke", "--seeds=2"]
    assert replaced.value.args == (sys.executable, command)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "madda"], "no experiment 'madda'; did you mean mada?"),
        (["run", "zzzzzz"], "no experiment 'zzzzzz'; icmljax list shows all"),
        (["run"], "got 'run'; see icmljax --help"),
        (["run", "--preset=smoke"], "got 'run --preset=smoke'; see icmljax --help"),
        (["lst"], "got 'lst'; see icmljax --help"),
    ],
)
def test_bad_commands_give_one_line(run_cli, arguments, message):
    assert run_cli(*arguments) == (1, "", f"error: {message}\n")
