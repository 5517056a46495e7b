"""Metric writers and their reader."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.training.metrics import MetricWriter, read_metrics


def test_rows_are_exact_and_deterministic(tmp_path):
    for name in ("a", "b"):
        with MetricWriter(tmp_path / name, tensorboard=False) as writer:
            writer.write(1, {"loss": jnp.float32(0.1), "count": 3})
            writer.write(2, {"loss": jnp.array([1.5, jnp.nan]), "bad": math.inf})
    text = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert text == (tmp_path / "b" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "loss": 0.10000000149011612, "count": 3.0}\n'
        '{"step": 2, "loss": [1.5, null], "bad": null}\n'
    )


def test_reader_returns_steps_and_values(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer.write(5, {"loss": 2.0, "members": np.array([1.0, math.nan])})
        writer.write(10, {"loss": math.nan})
        writer.write(15, {"members": np.array([3.0, 4.0])})
    steps, losses = read_metrics(tmp_path, "loss")
    np.testing.assert_array_equal(steps, [5, 10])
    np.testing.assert_array_equal(losses, [2.0, math.nan])
    steps, members = read_metrics(tmp_path, "members")
    np.testing.assert_array_equal(steps, [5, 15])
    np.testing.assert_array_equal(members, [[1.0, math.nan], [3.0, 4.0]])


@pytest.mark.parametrize("resume_step", [0, 2, 3])
@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', '{"step": 3}'])
def test_resume_cuts_later_and_torn_rows(tmp_path, torn, resume_step):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": step})
    path = tmp_path / "metrics.jsonl"
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:resume_step])
    path.write_bytes(path.read_bytes() + torn.encode())
    with MetricWriter(tmp_path, tensorboard=False, resume_step=resume_step) as writer:
        writer.write(4, {"loss": 4})
    assert path.read_bytes() == kept + b'{"step": 4, "loss": 4.0}\n'


def test_rows_are_readable_while_the_run_goes_on(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0}


def test_tensorboard_files_are_written(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"a_long_metric_name": np.array([1.0, 2.0])})
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"a_long_metric_name" in events.read_bytes()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with MetricWriter(tmp_path / "run") as writer:
        writer.write(1, {"loss": 1.0})
        writer.flush()
    assert not (tmp_path / "run").exists()


@pytest.mark.bad_input
def test_bad_input(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="'step'"):
            writer.write(1, {"step": 1})
        with pytest.raises(ValueError, match=r"'loss' has shape \(2, 2\)"):
            writer.write(1, {"loss": np.zeros((2, 2))})
        writer.write(1, {"loss": 1.0})
    with pytest.raises(FileExistsError, match="exists; resume that run"):
        MetricWriter(tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match=r"no metric 'los', it has \['loss'\]"):
        read_metrics(tmp_path, "los")
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "nowhere", "loss")
