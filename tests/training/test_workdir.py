"""The folder of a run and its record."""

import os
import subprocess
import sys

import jax
import pytest

from icmljax.training import workdir


def prepare(path, resume=False, **changes):
    arguments = {"experiment": "mada", "flags": {"seeds": 3, "betas": (0.9, 0.99)}} | changes
    return workdir.prepare(path, resume=resume, **arguments)


def test_record_says_what_ran(tmp_path):
    path = prepare(tmp_path / "new" / "run")
    record = workdir.read_json(path / "run.json")
    assert record["experiment"] == "mada"
    assert record["flags"] == {"seeds": 3, "betas": [0.9, 0.99]}
    assert record["command"] == sys.argv
    assert record["packages"]["jax"] == jax.__version__
    assert record["device"].startswith(f"{jax.device_count()} x ")
    assert record["commit"]
    assert record["resumed"] == []
    assert sorted(entry.name for entry in path.iterdir()) == ["run.json"]


def test_resume_keeps_the_record_and_adds_to_it(tmp_path):
    path = prepare(tmp_path)
    (path / "metrics.jsonl").touch()
    first = workdir.read_json(path / "run.json")
    assert prepare(tmp_path, resume=True) == path
    second = workdir.read_json(path / "run.json")
    assert len(second.pop("resumed")) == 1
    first.pop("resumed")
    assert second == first


def test_resume_in_an_empty_folder_starts(tmp_path):
    (tmp_path / "run.json.tmp").touch()  # as a run leaves it that was killed at once
    path = prepare(tmp_path, resume=True)
    assert workdir.read_json(path / "run.json")["resumed"] == []


def test_commit_is_that_of_a_tracked_file_only(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "workdir.py"
    source.touch()
    monkeypatch.setattr(workdir, "__file__", str(source))
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "first")
    assert workdir._commit() == "unknown"  # somebody else's repository around an installed package
    git("add", "workdir.py")
    git("commit", "--quiet", "-m", "second")
    commit = git("rev-parse", "HEAD")
    assert workdir._commit() == commit
    source.write_text("changed")
    assert workdir._commit() == f"{commit}-dirty"


def test_write_json_is_atomic(tmp_path):
    path = tmp_path / "summary.json"
    workdir.write_json(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        workdir.write_json(path, {"first": 1, "loss": object()})
    assert workdir.read_json(path) == {"loss": 1.0}


@pytest.mark.bad_input
def test_another_run_is_refused_and_untouched(tmp_path):
    path = prepare(tmp_path)
    before = (path / "run.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"not empty \(it holds run.json\).*--resume"):
        prepare(tmp_path)
    with pytest.raises(ValueError, match="belongs to the experiment 'mada', expected 'other'"):
        prepare(tmp_path, resume=True, experiment="other")
    with pytest.raises(ValueError, match="seeds was 3, now 'not set'; steps was 'not set', now 5"):
        prepare(tmp_path, resume=True, flags={"steps": 5, "betas": [0.9, 0.99]})
    assert (path / "run.json").read_bytes() == before
    workdir.write_json(
        path / "run.json", workdir.read_json(path / "run.json") | {"format_version": 9}
    )
    with pytest.raises(ValueError, match="format version 9, expected 1"):
        prepare(tmp_path, resume=True)


@pytest.mark.bad_input
def test_unusable_folders(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\)"):
        prepare(tmp_path / "file" / "run")
    with pytest.raises(ValueError, match=r"no run.json.*it holds file"):
        prepare(tmp_path, resume=True)
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"):
            prepare(tmp_path / "closed")
    (tmp_path / "cut.json").write_text('{"loss": ')
    with pytest.raises(ValueError, match=r"cut.json is not valid JSON"):
        workdir.read_json(tmp_path / "cut.json")
    with pytest.raises(FileNotFoundError):
        workdir.read_json(tmp_path / "nothing.json")


@pytest.mark.bad_input
def test_other_processes_learn_that_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setattr(workdir.multihost_utils, "broadcast_one_to_all", lambda own: True)
    with pytest.raises(RuntimeError, match="process 0 could not prepare"):
        prepare(tmp_path / "run")
    assert not (tmp_path / "run").exists()
