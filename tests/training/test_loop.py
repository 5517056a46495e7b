"""The run loop: resumes bit by bit after any end, and stops where it must."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from icmljax.data.batches import BatchIterator
from icmljax.training import loop
from icmljax.training.checkpoint import Checkpoints
from icmljax.training.mesh import init_sharded, jit_step, make_mesh
from icmljax.training.metrics import read_metrics
from icmljax.training.state import TrainState, init_state, make_train_step

IDENTITY = {"experiment": "test"}
ROOT = pathlib.Path(__file__).resolve().parents[2]


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch["inputs"] @ params["in"])
    hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)  # the PRNG has to be resumed too
    loss = jnp.mean((hidden @ params["out"] - batch["targets"]) ** 2)
    return loss, {"scale": jnp.mean(jnp.abs(hidden))}


OPTIMIZER = optax.adam(1e-2)


def init(key):
    keys = jax.random.split(key, 3)
    params = {"in": jax.random.normal(keys[0], (8, 16)), "out": jax.random.normal(keys[1], (16, 1))}
    return init_state(params, OPTIMIZER, keys[2])


def make_batches(before=lambda index: None):
    def make_batch(index):
        before(index)
        rng = np.random.default_rng(index)
        inputs = rng.standard_normal((16, 8), dtype=np.float32)
        return {"inputs": inputs, "targets": inputs[:, :1] * 2}

    return BatchIterator(make_batch, fingerprint="test")


@functools.cache
def plain_step():
    return jax.jit(make_train_step(loss_fn, OPTIMIZER), donate_argnums=0)


def evaluate(state):
    return {"validation_loss": float(jnp.sum(state.params["out"] ** 2))}


def run(directory, *, state=None, batches=None, step=None, **changes):
    arguments = {
        "num_steps": 40,
        "directory": directory,
        "identity": IDENTITY,
        "evaluate": evaluate,
        "log_every": 3,
        "eval_every": 10,
        "checkpoint_every": 7,
        "progress": False,
    }
    return loop.run(
        init(jax.random.key(0)) if state is None else state,
        step or plain_step(),
        batches or make_batches(),
        **(arguments | changes),
    )


def content(state):
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def saved_steps(directory):
    names = [path.name for path in (pathlib.Path(directory) / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    state, evaluation = run(directory)
    return content(state), evaluation, (directory / "metrics.jsonl").read_bytes()


def assert_resumes_like(uninterrupted, directory):
    state, evaluation = run(directory, resume=True)
    assert content(state) == uninterrupted[0]
    assert evaluation == uninterrupted[1]
    assert (directory / "metrics.jsonl").read_bytes() == uninterrupted[2]


# What a run is


def test_takes_the_steps_that_a_plain_loop_takes(uninterrupted, tmp_path):
    state, rows = init(jax.random.key(0)), []
    for step, batch in zip(range(1, 41), make_batches(), strict=False):
        state, metrics = plain_step()(state, batch)
        if step % 3 == 0 or step % 10 == 0:
            row = {name: float(value) for name, value in metrics.items()}
            rows.append({"step": step} | row | (evaluate(state) if step % 10 == 0 else {}))
    assert content(state) == uninterrupted[0]
    assert [json.loads(line) for line in uninterrupted[2].splitlines()] == rows
    assert uninterrupted[1] == evaluate(state)


def test_a_finished_run_returns_at_once(tmp_path):
    first, evaluation = run(tmp_path, num_steps=5)

    def forbidden(*unused):
        raise AssertionError("a finished run takes no step")

    again = run(tmp_path, num_steps=5, resume=True, step=forbidden, batches=make_batches(forbidden))
    assert content(again[0]) == content(first)
    assert again[1] == evaluation


def test_a_run_can_be_prolonged(uninterrupted, tmp_path):
    run(tmp_path, num_steps=20)
    assert_resumes_like(uninterrupted, tmp_path)


def test_weakly_typed_states_resume_exactly(tmp_path):
    @jax.jit
    def step(state, batch):  # weak: the product is bfloat16; not weak: it is float32
        params = jax.tree.map(
            lambda leaf: (leaf * state.opt_state).astype(leaf.dtype), state.params
        )
        metrics = {"loss": jnp.sum(params["w"] * state.opt_state).astype(jnp.float32)}
        return state._replace(step=state.step + 1, params=params), metrics

    state = TrainState(
        jnp.int32(0), {"w": jnp.ones(5, jnp.bfloat16) / 3}, jnp.asarray(0.99), jax.random.key(0)
    )
    assert state.opt_state.weak_type
    options = {"state": state, "step": step, "evaluate": None, "log_every": 1}
    run(tmp_path / "once", num_steps=8, **options)
    run(tmp_path / "twice", num_steps=4, **options)
    run(tmp_path / "twice", num_steps=8, resume=True, **options)
    once, twice = (tmp_path / name / "metrics.jsonl" for name in ("once", "twice"))
    assert once.read_bytes() == twice.read_bytes()


def test_leaves_iterator_and_signals_as_they_should_be(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    batches = make_batches()
    run(tmp_path, num_steps=5, batches=batches)
    assert batches.state()["index"] == 5  # not run ahead past the last step
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_waits_for_the_device_only_to_log(tmp_path):
    class Loss:
        """Stands for an array on the device, and notes when it is fetched."""

        def __init__(self, step):
            self.step = step

        def __array__(self, dtype=None, copy=None):
            fetched.append((self.step, taken[-1]))
            return np.array(1.0, dtype)

    taken, fetched = [], []

    def step(state, batch):
        taken.append(len(taken) + 1)
        return state, {"loss": Loss(taken[-1])}

    run(tmp_path, step=step, num_steps=20, log_every=8, eval_every=0, checkpoint_every=10)
    assert {when for _, when in fetched} == {8, 10, 16, 20}
    assert {loss for loss, _ in fetched} == set(range(1, 21))  # but every one is looked at


def test_batches_are_made_ahead_and_in_order(tmp_path):
    made, seen = [], []

    def step(state, batch):
        deadline = time.monotonic() + 5
        while len(made) < min(len(seen) + 2, 10) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(float(batch["inputs"][0, 0]))
        return state, {"loss": jnp.float32(len(made) - len(seen))}

    run(tmp_path, step=step, batches=make_batches(made.append), num_steps=10, log_every=1)
    _, ahead = read_metrics(tmp_path, "loss")
    assert all(1 <= number <= 2 for number in ahead[:8])
    assert seen == [float(batch["inputs"][0, 0]) for batch in itertools.islice(make_batches(), 10)]


def test_keeps_the_last_and_the_best(tmp_path):
    losses = {5: 3.0, 10: 1.0, 15: 2.0, 20: 4.0}
    run(
        tmp_path,
        num_steps=20,
        eval_every=10,
        checkpoint_every=5,
        keep=1,
        best_metric="validation_loss",
        evaluate=lambda state: {"validation_loss": losses[int(state.step)]},
    )
    assert saved_steps(tmp_path) == [10, 20]
    steps, _ = read_metrics(tmp_path, "validation_loss")
    assert list(steps) == [5, 10, 15, 20]  # a step that is saved is measured


def test_progress_shows_loss_rate_and_eta_on_stderr(tmp_path, capfd):
    run(tmp_path, progress=True, description="arm", num_steps=6, items_per_step=16)
    out, err = capfd.readouterr()
    assert out == ""
    for part in ("arm: 100%", "6/6", "<00:00", "step/s", "loss=", "items/s="):
        assert part in err


@pytest.mark.parametrize(
    ("start", "num_steps", "steps"),
    [(0, 100, (10, 15)), (40, 100, (50, 55)), (0, 12, (7, 12)), (0, 3, (1, 3)), (7, 8, (8, 8))],
)
def test_profiled_steps(start, num_steps, steps):
    profiled = loop._profiled_steps(start, num_steps)
    assert (profiled[0], profiled[-1]) == steps


def test_profile_is_written_and_closed(tmp_path):
    for name in ("a", "b"):  # a trace left open would make the second one fail
        run(tmp_path / name, num_steps=4, profile_dir=tmp_path / name / "profile")
        assert list((tmp_path / name / "profile").rglob("*.xplane.pb"))


def test_profile_takes_a_few_steps(tmp_path, monkeypatch):
    taken, borders = [], []

    @contextlib.contextmanager
    def trace(directory):
        borders.append(len(taken))
        yield
        borders.append(len(taken))

    def step(state, batch):
        taken.append(batch)
        return plain_step()(state, batch)

    monkeypatch.setattr(jax.profiler, "trace", trace)
    run(tmp_path, step=step, profile_dir=tmp_path / "profile")
    assert borders == [9, 15]


def test_population_and_mesh(tmp_path):
    mesh = make_mesh("data=4,model=2")
    state, shardings = init_sharded(init, jax.random.key(0), OPTIMIZER, [], mesh)
    step = jit_step(make_train_step(loss_fn, OPTIMIZER), mesh, shardings)
    state, _ = run(tmp_path / "mesh", state=state, step=step, mesh=mesh, num_steps=10)
    members = jax.vmap(init)(jax.random.split(jax.random.key(1), 3))
    members = jax.tree.map(lambda one, all_: all_.at[1].set(one), init(jax.random.key(0)), members)
    step = jax.jit(jax.vmap(make_train_step(loss_fn, OPTIMIZER), in_axes=(0, None)))
    options = {"evaluate": None, "step": step}
    run(tmp_path / "population", state=members, num_steps=6, **options)
    run(tmp_path / "population", state=members, num_steps=10, resume=True, **options)
    steps, alone = read_metrics(tmp_path / "mesh", "loss")
    population_steps, together = read_metrics(tmp_path / "population", "loss")
    assert together.shape == (4, 3)
    assert list(population_steps) == [3, 6, 9, 10] == list(steps)
    np.testing.assert_allclose(together[:, 1], alone, rtol=1e-5)


# How it ends early


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_resumes_exactly(uninterrupted, tmp_path, number):
    def step(state, batch):
        if int(state.step) == 16:
            os.kill(os.getpid(), number)
        return plain_step()(state, batch)

    before = signal.getsignal(number)
    with pytest.raises(loop.Preempted, match="after step 17 of 40; saved"):
        run(tmp_path, step=step)
    assert signal.getsignal(number) is before
    assert saved_steps(tmp_path) == [14, 17]
    with_checkpoints = Checkpoints(tmp_path / "checkpoints", identity=IDENTITY)
    _, data_state, _ = with_checkpoints.restore(init(jax.random.key(1)))
    with_checkpoints.close()
    assert data_state["index"] == 17  # not that of the batches made ahead
    assert_resumes_like(uninterrupted, tmp_path)


@pytest.mark.parametrize("when", ["evaluation", "end"])
def test_a_late_signal_is_not_lost(tmp_path, monkeypatch, when):
    """Lost, it would let the caller go on to the next run although it was asked to stop."""

    def stop(*unused):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"validation_loss": 1.0}

    if when == "end":
        monkeypatch.setattr(loop.MetricWriter, "close", stop)
    with pytest.raises(loop.Preempted, match="saved"):
        run(tmp_path, num_steps=5, evaluate=stop if when == "evaluation" else None)
    assert saved_steps(tmp_path) == [5]


def start_subprocess(*arguments, num_devices=8):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    command = [sys.executable, "-m", "tests.training.test_loop", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_rows(directory, number, process):
    path, deadline = pathlib.Path(directory) / "metrics.jsonl", time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline, "the run does not get ahead"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_resumes_exactly(uninterrupted, tmp_path, number):
    process = start_subprocess(tmp_path)
    wait_for_rows(tmp_path, random.randint(1, 10), process)
    time.sleep(random.random() / 20)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0), err.decode()
    assert len((tmp_path / "metrics.jsonl").read_bytes()) < len(uninterrupted[2])
    assert_resumes_like(uninterrupted, tmp_path)


def test_two_processes_stop_at_the_same_step(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [start_subprocess(tmp_path, address, i, num_devices=1) for i in range(2)]
    wait_for_rows(tmp_path, 2, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # the scheduler may tell one of them only
    ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    messages = [out.decode().splitlines()[-1] for out, _ in ends]
    assert messages[0] == messages[1]
    assert messages[0].startswith("stopped by a signal after step ")
    stopped = saved_steps(tmp_path)[-1]
    assert f"after step {stopped} of" in messages[0]
    assert len(list(tmp_path.glob("events.*"))) == 1  # process 0 alone writes metrics


def test_loss_that_is_not_finite_stops_at_its_step(tmp_path):
    def step(state, batch):
        ruined = int(state.step) >= 11
        state, metrics = plain_step()(state, batch)
        if ruined:
            state = state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
            metrics = {**metrics, "loss": jnp.float32(jnp.inf)}
        return state, metrics

    with pytest.raises(FloatingPointError, match="the loss is inf at step 12;"):
        run(tmp_path, step=step, checkpoint_every=5, log_every=0, eval_every=0)
    assert saved_steps(tmp_path) == [5, 10]
    checkpoints = Checkpoints(tmp_path / "checkpoints", identity=IDENTITY)
    state, _, _ = checkpoints.restore(init(jax.random.key(1)))
    checkpoints.close()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(FloatingPointError, match="step 12;"):
        run(tmp_path / "logged", step=step, checkpoint_every=0)
    assert list(read_metrics(tmp_path / "logged", "loss")[0]) == [3, 6, 9, 10]


def test_ruined_parameters_are_never_saved(tmp_path):
    def step(state, batch):
        ruined = int(state.step) == 9
        state, metrics = plain_step()(state, batch)
        if ruined:
            params = state.params | {"out": state.params["out"].at[0].set(jnp.nan)}
            state = state._replace(params=params)
        return state, metrics

    with pytest.raises(FloatingPointError, match=r"params\['out'\] is not finite after step 10"):
        run(tmp_path, step=step, checkpoint_every=5)
    assert saved_steps(tmp_path) == [5]


def test_members_of_a_population_may_fail_if_allowed(tmp_path):
    def step(state, batch):
        state = state._replace(step=state.step + 1)
        return state, {"loss": jnp.where(state.step == 4, jnp.array([1.0, 1.0, jnp.nan]), 2.0)}

    state = TrainState(jnp.zeros(3, jnp.int32), {"w": jnp.ones(3)}, (), jax.random.key(0))
    options = {"state": state, "step": step, "evaluate": None, "num_steps": 6}
    with pytest.raises(FloatingPointError, match=r"nan at step 4 in members \[2\]"):
        run(tmp_path / "strict", **options)
    run(tmp_path / "lax", stop_on_nonfinite=False, log_every=2, **options)
    np.testing.assert_array_equal(
        read_metrics(tmp_path / "lax", "loss")[1], [[2, 2, 2], [1, 1, np.nan], [2, 2, 2]]
    )


def test_error_in_the_data_surfaces_at_its_step(tmp_path):
    def before(index):
        if index == 16:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        run(tmp_path, batches=make_batches(before))
    assert read_metrics(tmp_path, "loss")[0][-1] == 15
    assert saved_steps(tmp_path) == [7, 14]


@pytest.mark.bad_input
def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        run(tmp_path, num_steps=0)
    with pytest.raises(ValueError, match="must not be negative, got 3, -1, 7"):
        run(tmp_path, eval_every=-1)
    with pytest.raises(ValueError, match="'loss' needs an evaluate function"):
        run(tmp_path, best_metric="loss", evaluate=None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"names that the training metrics have already: \['loss'\]"
    ):
        run(tmp_path / "names", evaluate=lambda state: {"loss": 1.0})

    class Short(BatchIterator):
        def __next__(self):
            if self.state()["index"] == 3:
                raise StopIteration
            return super().__next__()

    short = Short(make_batches()._make_batch, fingerprint="test")
    with pytest.raises(ValueError, match="the batches ended before the last step"):
        run(tmp_path / "short", batches=short)


@pytest.mark.bad_input
def test_a_run_is_not_overwritten(tmp_path):
    run(tmp_path, num_steps=5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match=r"holds the checkpoints of a run \(step 5\)"):
        run(tmp_path)
    with pytest.raises(ValueError, match=r"belongs to .*'test'"):
        run(tmp_path, resume=True, identity={"experiment": "other"})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def main(directory, address=None, process_id=None):
    """The run that tests kill: slow enough to be hit in the middle."""
    batches = make_batches(lambda index: time.sleep(0.02))
    try:
        if address is None:
            run(directory, batches=batches)
            return
        jax.distributed.initialize(address, num_processes=2, process_id=int(process_id))
        mesh = make_mesh(None)
        state, shardings = init_sharded(init, jax.random.key(0), OPTIMIZER, [], mesh)
        step = jit_step(make_train_step(loss_fn, OPTIMIZER), mesh, shardings)
        options = {"num_steps": 10_000, "evaluate": None, "log_every": 1}
        run(directory, state=state, step=step, batches=batches, mesh=mesh, **options)
    except loop.Preempted as preempted:
        print(preempted)


if __name__ == "__main__":
    main(*sys.argv[1:])
