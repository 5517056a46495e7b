"""What all experiments share: flags, errors, arms, statistics, the report."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from icmljax.experiments.common import app, report
from icmljax.experiments.common.arms import run_arms
from icmljax.training.loop import Preempted
from icmljax.training.mesh import make_mesh

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: int = 3


@dataclasses.dataclass(frozen=True)
class Seedless:
    num_steps: int = 3


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the fake experiment as a user would."""
    command = [sys.executable, "-m", "tests.experiments.fake", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def run_app(monkeypatch, capsys, tmp_path):
    """Runs ``app.run`` in this process: ``(flags, main) -> (exit status, stdout, stderr)``."""
    monkeypatch.chdir(tmp_path)

    def run(*flags, main=lambda context: None):
        monkeypatch.setattr(sys, "argv", ["fake", *flags])
        presets = {"smoke": Config(), "paper": Seedless()}
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit_:
            app.run("fake", presets, main)
        return exit_.value.code or 0, *capsys.readouterr()

    return run


def make_context(workdir, *, arms=(), resume=False, **others):
    return app.Context(
        experiment="fake",
        preset="smoke",
        config=Config(),
        workdir=workdir,
        mesh=make_mesh(None),
        arms=arms,
        resume=resume,
        dry_run=False,
        data_dir=None,
        progress=False,
        **({"profile": False} | others),
    )


# The application


def test_script_from_the_command_line(tmp_path):
    first = run_script(f"--workdir={tmp_path}", "--arms=digits/*", "--seeds=4", "--power=3")
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    lines = first.stdout.splitlines()
    assert "PASS  MADA below Adam: 1 < 2" in lines
    assert lines[-3:] == [str(tmp_path / name) for name in ("table.md", "loss.png", "summary.json")]

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["results"]) == ["digits/adam", "digits/mada"]
    assert summary["results"]["digits/adam"]["losses"][1] == [2, 16, 54, 128]  # --seeds, --power
    assert summary["verdicts"] == [{"bar": "MADA below Adam", "measured": "1 < 2", "passed": True}]
    assert json.loads((tmp_path / "arms/digits/mada/summary.json").read_text())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["flags"] == {"preset": "smoke", "seeds": 4, "data_dir": None, "power": 3}

    changed = run_script(f"--workdir={tmp_path}", "--resume", "--seeds=4")
    assert changed.returncode == 1
    assert changed.stderr.startswith("error: ")
    assert "power was 3, now 2" in changed.stderr
    assert changed.stderr.count("\n") == 1
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_dry_run_on_virtual_devices_writes_nothing(tmp_path):
    workdir = tmp_path / "new"
    done = run_script(
        f"--workdir={workdir}", "--dry_run", "--num_virtual_devices=6", "--mesh=data=3,model=2"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["6", "3", "2"]
    assert not workdir.exists()


def test_flags_arrive_in_the_context(run_app, tmp_path):
    seen = []
    status, out, err = run_app(
        "--seeds=7", f"--data_dir={tmp_path}", "--arms=a,b", "--noprogress", main=seen.append
    )
    assert (status, out, err) == (0, "", "")
    (context,) = seen
    assert context.config == Config(seeds=7)
    assert context.workdir == tmp_path / "runs" / "fake-smoke"
    assert context.data_dir == tmp_path
    assert context.arms == ("a", "b")
    assert not context.progress
    assert dict(context.mesh.shape) == {"data": 8, "model": 1}


def test_loop_options_name_the_arm(tmp_path):
    options = make_context(tmp_path, profile=True).loop_options("digits/mada")
    assert options["directory"] == tmp_path / "arms" / "digits" / "mada"
    assert options["profile_dir"] == options["directory"] / "profile"
    assert options["identity"] == {"experiment": "fake", "arm": "digits/mada"}
    assert make_context(tmp_path).loop_options("x")["profile_dir"] is None


def test_preempted_run_exits_cleanly(run_app):
    def main(context):
        raise Preempted("stopped at step 3, saved; go on with --resume")

    assert run_app(main=main) == (0, "", "stopped at step 3, saved; go on with --resume\n")


def test_debug_nans_is_set_and_traceback_is_shown_on_request(run_app):
    def main(context):
        assert jax.config.jax_debug_nans
        raise ValueError("two\nlines")

    try:
        status, _, err = run_app("--debug_nans", "--verbosity=0", main=main)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert status == 1
    assert err.endswith("error: two lines\n")


def test_programming_errors_are_not_hidden(run_app, monkeypatch):
    def main(context):
        raise KeyError("x")

    monkeypatch.setattr(sys, "argv", ["fake"])
    with flagsaver.flagsaver(), pytest.raises(KeyError):
        app.run("fake", {"smoke": Config()}, main)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset=huge"], "unknown preset 'huge'; there are: smoke, paper"),
        (["--preset=paper", "--seeds=2"], "the preset 'paper' has no seeds to set"),
        (["--data_dir=missing"], "no data folder "),
        (["--mesh=data=3"], "mesh 'data=3' needs 3 devices, but there are 8"),
        (["--workdir=file/run"], "cannot be written (Not a directory)"),
        (["--workdir=full"], "is not empty (it holds notes.txt); resume that run with --resume"),
        (["--num_processes=2"], "needs --coordinator_address, --num_processes and --process_id"),
        (["--seeds=0"], "flag --seeds=0: 0 is not a positive integer"),
        (["--no_such_flag"], "Unknown command line flag 'no_such_flag'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--arms=a,b*"], "--arms: no arm 'b*'; there are: a, c"),
    ],
)
def test_bad_flags_give_one_line(run_app, tmp_path, flags, message):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()

    def main(context):
        run_arms(context, {"a": lambda folder: {}, "c": lambda folder: {}})

    status, out, err = run_app(*flags, main=main)
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.bad_input
def test_missing_extra_names_the_install_command(run_app, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else found(name)
    )
    status, _, err = run_app()
    assert status == 1
    assert err == "error: rich is not installed; pip install 'icmljax[experiments]'\n"


# Arms


def test_arms_resume_on_their_own(tmp_path):
    ran = []

    def arm(name):
        def run(folder):
            assert folder == tmp_path / "arms" / name
            assert folder.is_dir()
            ran.append(name)
            return {"name": name, "count": len(ran)}

        return run

    def broken(folder):
        raise FloatingPointError("not finite")

    good = {name: arm(name) for name in ("a/x", "a/y", "b/x")}
    with pytest.raises(FloatingPointError):
        run_arms(make_context(tmp_path), good | {"a/y": broken})
    assert ran == ["a/x"]

    results = run_arms(make_context(tmp_path, resume=True, arms=("b/*",)), good)
    assert ran == ["a/x", "b/x"]
    assert results == {"a/x": {"name": "a/x", "count": 1}, "b/x": {"name": "b/x", "count": 2}}
    assert list(run_arms(make_context(tmp_path, resume=True), good)) == ["a/x", "a/y", "b/x"]
    assert ran == ["a/x", "b/x", "a/y"]


# Statistics


def test_mean_and_standard_error():
    mean, error = report.mean_and_standard_error([[1, 2], [3, 6]])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt(14 / 3) / 2)
    mean, error = report.mean_and_standard_error([5.0])
    assert mean == 5.0
    assert math.isnan(error)


def test_paired_bootstrap_uses_the_pairs():
    shared = np.random.default_rng(0).normal(10.0, 5.0, 50)
    noise = np.random.default_rng(1).normal(0.0, 0.1, 50)
    estimate, low, high = report.paired_bootstrap(shared + 1 + noise, shared)
    assert estimate == pytest.approx(1 + noise.mean())
    # The normal interval; drawn without the pairs it would be forty times as wide.
    half = 1.96 * noise.std() / math.sqrt(50)
    assert low == pytest.approx(estimate - half, abs=0.1 * half)
    assert high == pytest.approx(estimate + half, abs=0.1 * half)


def test_paired_bootstrap_covers():
    # 200 data sets of 30 pairs with true ratio 1/2: nominal coverage 95 % of the percentile
    # interval, some points less at this size. Below 176 of 200 has a chance of 1e-3 at 93 %.
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        b = rng.gamma(4.0, size=(30, 2))
        a = b * rng.uniform(0.3, 0.7, size=(30, 2))
        _, low, high = report.paired_bootstrap(
            a, b, statistic=report.ratio_of_means, num_resamples=200, seed=seed
        )
        covered += low <= 0.5 <= high
    assert 176 <= covered < 200


def test_paired_bootstrap_is_repeatable():
    def interval(seed):
        values = np.random.default_rng(0).normal(size=(2, 10))
        return report.paired_bootstrap(*values, num_resamples=100, seed=seed)

    assert interval(3) == interval(3)
    assert interval(3) != interval(4)


@pytest.mark.bad_input
def test_statistics_want_values():
    with pytest.raises(ValueError, match="got no values"):
        report.mean_and_standard_error([])
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(3,\)"):
        report.paired_bootstrap([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="the same number of pairs"):
        report.paired_bootstrap([], [])


# The report


def test_table_is_printed_whole_and_saved(tmp_path, capsys):
    rows = [
        {"arm": "adam [beta1=0.9]", "loss": (0.123456, 0.01234), "steps": 300},
        {"arm": "mada|avg", "loss": (0.5, math.nan), "best": 1.0 / 3},
    ]
    report.table(rows, title="Digits", path=tmp_path / "table.md")
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "**Digits**",
        "",
        "| arm | loss | steps | best |",
        "| --- | ---: | ---: | ---: |",
        "| adam [beta1=0.9] | 0.1235 ± 0.012 | 300 |  |",
        "| mada\\|avg | 0.5 |  | 0.3333 |",
    ]
    out = capsys.readouterr().out
    assert "adam [beta1=0.9]   0.1235 ± 0.012     300" in out
    report.table([{f"column {i}": "x" * 8 for i in range(12)}])
    assert "column 11" in capsys.readouterr().out


def test_plot_draws_mean_and_band(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: (drawn.append(figure), save(figure, path))
    )
    values = np.array([[1.0, 3.0], [2.0, 6.0]])
    report.plot(
        tmp_path / "plot.png",
        {
            "loss": {"adam": report.Curve([0, 10], values), "mada": report.Curve([0, 10], [1, 2])},
            "rho": {"mada": report.Curve([0, 10], [0.5, 0.1])},
        },
        log_y=True,
    )
    assert (tmp_path / "plot.png").stat().st_size > 5000
    loss, rho = drawn[0].axes
    adam, mada = loss.lines
    np.testing.assert_array_equal(adam.get_xydata(), [[0, 2], [10, 4]])
    (band,) = loss.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {
        (0.0, 1.0),
        (0.0, 3.0),
        (10.0, 2.0),
        (10.0, 6.0),
    }
    assert rho.lines[0].get_color() == mada.get_color() != adam.get_color()
    assert loss.get_yscale() == "log"
    assert [axis.get_ylabel() for axis in drawn[0].axes] == ["loss", "rho"]


def test_conclude_prints_failures_too(tmp_path, capsys):
    verdicts = [
        report.Verdict("a <= 1", "0.5", np.float32(0.5) <= 1),
        report.Verdict("b <= 1", "2.0", False),
    ]
    report.conclude(tmp_path, results={"b": 2.0}, verdicts=verdicts, files=["plot.png"])
    assert capsys.readouterr().out.splitlines() == [
        "PASS  a <= 1: 0.5",
        "FAIL  b <= 1: 2.0",
        "plot.png",
        str(tmp_path / "summary.json"),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["results"] == {"b": 2.0}
    assert [verdict["passed"] for verdict in summary["verdicts"]] == [True, False]
