"""MADA's experiment: what a user may get wrong, and what its parts say about their results."""

import functools
import json
import shutil
import socket

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from icmljax.experiments.common import app
from icmljax.experiments.mada import counterexample, digits, text
from icmljax.experiments.mada.shared import NAMES
from icmljax.training import mesh as mesh_lib
from icmljax.training.mesh import make_mesh

EXPERIMENT = "mada"
ADAM = "counterexample/adam"


@pytest.fixture
def finished(tmp_path, run_script):
    """The workdir of a run of one arm."""
    workdir = tmp_path / "finished"
    status, _, err = run_script("--preset=smoke", f"--arms={ADAM}", f"--workdir={workdir}")
    assert (status, err) == (0, "")
    return workdir


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_context(workdir, **others):
    options = dict(
        experiment="mada",
        preset="smoke",
        config=None,
        workdir=workdir,
        mesh=make_mesh(None),
        arms=(),
        resume=False,
        dry_run=False,
        data_dir=None,
        progress=False,
        profile=False,
    )
    return app.Context(**options | others)


# Bad input: one line, exit status 1, nothing left behind and nothing overwritten


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("mesh 'data=3' needs 3 devices, but there are 8", ["--mesh=data=3"]),
        ("unknown preset 'papr'; there are: smoke, demo, reduced,", ["--preset=papr"]),
        ("no data folder ", ["--data_dir=missing"]),
        ("give their folder as --data_dir", ["--preset=paper"]),
        ("train.bin not found: expected", ["--preset=paper", "--data_dir=empty"]),
        ("the folder ", ["--preset=mesh", "--data_dir=empty"]),
        ("there are 8; choose sizes", ["--preset=paper", "--dry_run", "--mesh=data=64"]),
        ("no arm 'text/madam/*'; there are: counterexample/adam, ", ["--arms=text/madam/*"]),
        ("no arm 'mada'; there are: text/adam/", ["--preset=paper", "--dry_run", "--arms=mada"]),
        ("flag --precision=f16: value should be one of <f32|bf16|", ["--precision=f16"]),
    ],
)
def test_wrong_flags(fails, tmp_path, monkeypatch, message, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    fails(message, "--workdir=new", *flags)
    assert contents(tmp_path) == {}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "train", "validation"),
    [
        ("train.bin has 4001 bytes, an odd number", np.zeros(4001, np.uint8), None),
        ("this looks like 32-bit integers", np.arange(2000, dtype=np.uint32), None),
        ("holds the token 60000, expected", np.full(2000, 60000, np.uint16), None),
        ("1024 tokens are shorter than a block", np.arange(1024), np.arange(2000)),
        ("1000 tokens are shorter than a block", np.arange(2000), np.arange(1000)),
        ("val.bin is empty", np.arange(2000), np.arange(0)),
    ],
)
def test_wrong_token_files(fails, tmp_path, monkeypatch, message, train, validation):
    monkeypatch.setattr(text, "run_text", None)  # the error comes before anything is built
    train = train.astype(np.uint16) if train.dtype == np.int64 else train
    train.tofile(tmp_path / "train.bin")
    (train if validation is None else validation.astype(np.uint16)).tofile(tmp_path / "val.bin")
    workdir = tmp_path / "new"
    fails(message, "--preset=paper", f"--data_dir={tmp_path}", f"--workdir={workdir}")
    # The same folder may be used as soon as the files are right.
    assert contents(workdir) == {}


@pytest.mark.bad_input
def test_batch_that_does_not_divide(program):
    part = program.PRESETS["paper"].text
    message = r"480 sequences does not divide over data=64; .* --mesh=data=32,model=2"
    with pytest.raises(ValueError, match=message):
        text._accumulation(part, AbstractMesh((64, 1), ("data", "model")))


@pytest.mark.bad_input
def test_workdirs_that_cannot_be_used(fails, tmp_path, finished):
    (tmp_path / "file").touch()
    fails("cannot be written (Not a directory)", f"--workdir={tmp_path / 'file' / 'run'}")

    before = contents(finished)
    at = f"--workdir={finished}"
    fails("is not empty (it holds arms, counterexample.md, ", at)
    fails("preset was 'smoke', now 'mesh'", at, "--preset=mesh", "--resume")
    fails("num_steps was None, now 7", at, "--num_steps=7", "--resume")
    assert contents(finished) == before

    record = finished / "run.json"
    record.write_text(record.read_text().replace('"experiment": "mada"', '"experiment": "osn"'))
    before = contents(finished)
    fails("belongs to the experiment 'osn', expected 'mada'", at, "--resume")
    assert contents(finished) == before


@pytest.mark.bad_input
def test_checkpoints_that_cannot_be_used(fails, tmp_path, finished):
    adam, mada = (finished / "arms/counterexample" / name for name in ("adam", "mada"))
    shutil.copytree(adam, mada)
    (mada / "summary.json").unlink()
    flags = [f"--workdir={finished}", "--resume", "--arms=counterexample/mada"]
    before = contents(finished / "arms")
    fails("belongs to {'experiment': 'mada', 'arm': 'counterexample/adam'}, expected", *flags)
    assert contents(finished / "arms") == before

    meta = mada / "checkpoints/10/meta/metadata"
    meta.write_text(meta.read_text().replace(ADAM, "counterexample/mada"))
    before = contents(finished / "arms")
    fails("does not fit the state to restore: .opt_state", *flags)
    assert contents(finished / "arms") == before

    meta.write_text(meta.read_text()[:100])
    before = contents(finished / "arms")
    fails("is damaged (step 10: ", *flags)
    assert contents(finished / "arms") == before


@pytest.mark.bad_input
def test_static_arm_needs_what_was_learned(fails, tmp_path):
    arm = "text/mada-static/seed-0"
    message = f"the arm {arm} starts from the arm text/mada/seed-0: run it too"
    fails(message, "--preset=reduced", f"--arms={arm}", f"--workdir={tmp_path}")


@pytest.mark.bad_input
def test_runs_of_several_processes(fails, program, monkeypatch, tmp_path):
    start = functools.partial(mesh_lib.initialize_distributed, timeout_s=0.2)
    monkeypatch.setattr(mesh_lib, "initialize_distributed", start)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        flags = [f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2", "--preset=mesh"]
        workdir = f"--workdir={tmp_path / 'new'}"
        fails(f"process 0 cannot listen on port {port}", *flags, "--process_id=0", workdir)
    fails("did not report to process 0", *flags, "--process_id=0", workdir)
    fails("did not get an answer from process 0", *flags, "--process_id=1", workdir)
    assert contents(tmp_path) == {}

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    smoke = program.PRESETS["smoke"]
    for parts in ((smoke.counterexample, {}, None), (None, {"digits": smoke.digits[0]}, None)):
        with pytest.raises(ValueError, match="use a preset with the text part alone, such as mesh"):
            program._arms(make_context(tmp_path, config=smoke), *parts)


# What the parts measure and say


def test_finished_arms_are_not_run_again(run_script, finished):
    arm = finished / "arms" / ADAM
    before = {path: path.stat().st_mtime_ns for path in arm.rglob("*")}
    summary = json.loads((finished / "summary.json").read_text())
    status, out, err = run_script(f"--workdir={finished}", f"--arms={ADAM}", "--resume")
    assert (status, err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in arm.rglob("*")} == before
    assert json.loads((finished / "summary.json").read_text()) == summary
    assert out.splitlines()[-1] == str(finished / "summary.json")


def test_counterexample_is_the_problem_of_reddi_et_al(tmp_path):
    part = counterexample.CounterExample(1010, arms=("adam",), chunk=101)
    result = counterexample.run_counterexample(make_context(tmp_path), "adam", part)
    assert result["steps"] == list(range(101, 1011, 101))

    x, m, v, path = 0.0, 0.0, 0.0, []
    for t in range(1, 1011):
        g = 1010.0 if t % 101 == 1 else -10.0
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        x = float(np.clip(x - 1e-3 * step, -1, 1))
        path.append(x)
    np.testing.assert_allclose(result["x"], path[100::101], rtol=1e-9)
    assert jax.numpy.zeros(()).dtype == np.float32  # x64 was switched off again


def test_arm_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path):
    part = counterexample.CounterExample(200, chunk=10)
    arms = [make_context(tmp_path / name, resume=True) for name in ("whole", "damaged")]
    whole, first = (counterexample.run_counterexample(arm, "mada", part) for arm in arms)
    assert first == whole
    shutil.rmtree(arms[1].arm("counterexample/mada") / "checkpoints/20/state/d")
    assert counterexample.run_counterexample(arms[1], "mada", part) == whole
    folder = arms[1].arm("counterexample/mada") / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"10", "20", "20.damaged"}
    files = [arm.arm("counterexample/mada") / "metrics.jsonl" for arm in arms]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["adam", "avgrad", "mada"])
def test_counterexample_verdicts_follow_the_bars(name):
    part = counterexample.CounterExample(1_000_000)
    steps = [100_000, 1_000_000]
    good = {"adam": [0.5, 0.95], "avgrad": [0.0, -0.95], "mada": [0.5, 0.1]}[name]
    for x, rho, passed in [
        (good, [0.01, 0.0], True),
        ([good[0], good[0]], [0.01, 0.0], False),
        (good, [0.2, 0.0], name != "mada"),
    ]:
        results = {name: {"steps": steps, "x": x, "rho": rho}}
        _, (verdict,), _ = counterexample.counterexample_report(part, results)
        assert verdict.passed == passed
    assert (
        counterexample.counterexample_report(
            counterexample.CounterExample(20_000), {name: {"steps": steps, "x": good, "rho": good}}
        )[1]
        == []
    )


def test_digits_report_counts_diverged_runs_and_judges():
    part = digits.DigitsGrid(300, 1e-3, ("adam", "hyper_adam", "mada"))
    rng = np.random.default_rng(0)

    def arm(loss, spread):
        losses = loss + spread * np.tile(np.linspace(-1, 1, 20), 3) + 1e-3 * rng.normal(size=60)
        losses = losses.tolist()
        return {"train_loss": losses, "test_loss": losses, "test_accuracy": [0.9] * 60}

    results = {"adam": arm(0.5, 0.4), "hyper_adam": arm(0.5, 0.1), "mada": arm(0.2, 0.05)}
    rows, verdicts = digits.digits_report(part, 3, results)
    assert [verdict.passed for verdict in verdicts] == [True] * 4
    assert [row["diverged"] for row in rows] == [0, 0, 0]
    assert rows[0]["std over betas"] == pytest.approx(0.4 * np.linspace(-1, 1, 20).std(), rel=0.01)
    assert rows[0]["worst"] == pytest.approx(0.9, rel=0.01)

    results["mada"] = arm(0.45, 0.3)
    results["mada"]["train_loss"] = [
        None,
        2.5,
        *results["mada"]["train_loss"][2:],
    ]  # JSON has no NaN; worse than guessing
    rows, verdicts = digits.digits_report(part, 3, results)
    assert rows[2]["diverged"] == 2
    assert [verdict.passed for verdict in verdicts] == [False, True, False, False]


def test_text_verdict_asks_for_loss_and_moved_coefficients(tmp_path, program):
    part = program.PRESETS["reduced"].text
    start = dict(zip(NAMES, (0.9, 0.95, 0.0, 0.6, 1.0, 1.0), strict=True))

    def passed(loss, **moved):
        results = {}
        for name, value in (("adam", 2.0), ("mada", loss)):
            results[name] = []
            for seed in range(3):
                arm = tmp_path / "arms" / "text" / name / f"seed-{seed}"
                arm.mkdir(parents=True, exist_ok=True)
                row = {"step": 10, "loss": value, "eval_loss": value} | start
                (arm / "metrics.jsonl").write_text(json.dumps(row) + "\n")
                result = {"eval_loss": value + 0.01 * seed, "train_loss": value}
                results[name].append(result)
                if name == "mada":
                    result["coefficients"] = start | moved
        rows, (verdict,), panels = text.text_report(make_context(tmp_path), part, results)
        assert rows[0]["validation loss"] == pytest.approx((2.01, 0.01 / np.sqrt(3)))
        assert panels["rho"].keys() == {"mada"}
        assert np.shape(panels["training loss"]["adam"].values) == (1, 3)
        return verdict.passed

    assert passed(2.005, rho=0.5)
    assert not passed(2.02, rho=0.5)
    assert not passed(2.005)


def test_every_arm_has_an_optimizer(program):
    params = {"kernel": jax.numpy.ones(3)}
    for config in program.PRESETS.values():
        for grid in config.digits:
            for name in grid.arms:
                digits.digits_optimizer(name, 1e-3, 0.9, 0.95).init(params)
        if config.counterexample:
            for name in config.counterexample.arms:
                counterexample.counterexample_optimizer(name, 1e-3).init(params)
        if config.text:
            for name in config.text.arms:
                text.text_optimizer(name, config.text).init(params)
            assert "adam" in config.text.arms
            text._accumulation(config.text, make_mesh(None))


def test_paper_preset_is_the_paper(program):
    part = program.PRESETS["paper"].text
    assert (part.num_steps, part.batch_size, part.model.block_size) == (100_000, 480, 1024)
    rows = part.batch_size // 8 // text._accumulation(part, make_mesh(None))
    assert rows == part.rows_per_device == 3


def test_text_of_the_user_is_read(tmp_path, program):
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 101)) * 10)
    tokens = text.load_tokens(
        make_context(tmp_path, data_dir=tmp_path), program.PRESETS["mesh"].text
    )
    assert len(tokens.train) == 900 and len(tokens.validation) == 100
    assert tokens.vocab_size == 256
