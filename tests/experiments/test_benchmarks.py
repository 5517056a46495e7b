"""The benchmarks' machinery; nothing here depends on how fast anything is."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from icmljax.experiments.benchmarks import harness, kernels
from icmljax.experiments.benchmarks import mada as benchmark
from icmljax.optimizers import mada

ROOT = pathlib.Path(__file__).resolve().parents[2]


class FakeClock:
    """Stands for the time module: work takes what it says it takes."""

    def __init__(self):
        self.cpu = self.wall = 0.0
        self.calls = []

    def process_time(self):
        return self.cpu

    def perf_counter(self):
        return self.wall

    def case(self, name, seconds):
        """A function whose calls take these wall times (the last one for ever), half of it CPU."""
        durations = iter(seconds)
        last = seconds[-1]

        def work():
            duration = next(durations, last)
            self.calls.append(name)
            self.wall += duration
            self.cpu += duration / 2

        return work


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(harness, "time", fake)
    return fake


def test_compare_takes_turns_and_keeps_compilation_apart(clock):
    cases = {"a": clock.case("a", [9, 5, 4, 2, 3]), "b": clock.case("b", [7, 5, 1])}
    timings = harness.compare(cases, rounds=3, warmup=1)
    assert clock.calls == ["a", "b"] * 5
    assert (timings["a"].first, timings["b"].first) == (9, 7)
    np.testing.assert_allclose(timings["a"].wall, [4, 2, 3])
    np.testing.assert_allclose(timings["a"].cpu, [2, 1, 1.5])
    np.testing.assert_allclose(timings["b"].wall, [1, 1, 1])
    assert harness.ratio(timings, "a", "b", "wall") == 2


@pytest.mark.bad_input
def test_compare_needs_cases_and_rounds():
    with pytest.raises(ValueError, match="got 0 cases and 3 rounds"):
        harness.compare({}, rounds=3)
    with pytest.raises(ValueError, match="got 1 cases and 0 rounds"):
        harness.compare({"a": int}, rounds=0)


def test_rows_judge_smallest_times_by_the_bar():
    def timing(cpu, wall):
        return harness.Timing(np.array(cpu), np.array(wall), 0.5)

    timings = {
        "adam": timing([2e-3, 4e-3], [9.0, 9.0]),
        "mada": timing([8e-3, 8e-3], [9.0, 9.0]),
        "slow": timing([5e-2, 6e-2], [9.0, 9.0]),
    }
    bars = [harness.Bar("mada", "adam", 4.0), harness.Bar("slow", "mada", 6.0)]
    rows, verdicts = harness.rows(timings, clock="cpu", bars=bars)
    assert "ratio" not in rows[0]
    assert rows[1]["ratio"] == pytest.approx(4) and rows[1]["paired"] == pytest.approx(3)
    assert [row.get("") for row in rows] == [None, "PASS", "FAIL"]
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert verdicts[1].bar == "cpu time of slow <= 6 x mada"
    # A peer without a limit is shown and judged by nobody; the other clock gives other ratios.
    rows, verdicts = harness.rows(timings, clock="wall", bars=[harness.Bar("slow", "adam")])
    assert rows[2]["ratio"] == 1 and "bar" not in rows[2] and verdicts == []
    assert json.loads(json.dumps(harness.as_json(timings)))["mada"]["cpu_s"] == [8e-3, 8e-3]


def test_a_new_process_computes_with_one_thread(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.delenv("NPROC", raising=False)
    flags, threads = (
        harness.in_new_process(os.getenv, name, one_thread=True) for name in ("XLA_FLAGS", "NPROC")
    )
    expected = "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false"
    assert (flags, threads) == (expected, "1")
    assert "NPROC" not in os.environ


def test_naive_port_is_mada():
    keys = jax.random.split(jax.random.key(0), 7)
    params = {"w": jax.random.normal(keys[0], (5, 3)), "b": jnp.zeros(4)}
    naive, ours = benchmark.naive_mada(1e-2), mada.mada(1e-2, hyper_start_step=0)
    states = [naive.init(params), ours.init(params)]
    for key in keys[1:]:
        gradients = jax.tree.map(lambda x, k=key: jax.random.normal(k, x.shape), params)
        updates = []
        for i, optimizer in enumerate((naive, ours)):
            update, states[i] = jax.jit(optimizer.update)(gradients, states[i], params)
            updates.append(update)
        for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)
    hyper = mada.hyperparams(states[1])
    np.testing.assert_allclose(states[0].hyper, hyper, rtol=1e-4)
    assert all(h != start for h, start in zip(hyper[:4], mada.DEFAULT_INIT[:4], strict=True))


def test_optimizer_case_steps_with_donated_state_and_leaves_the_parameters():
    params, gradients = jnp.ones((3, 2)), [jnp.ones((3, 2)), -jnp.ones((3, 2))]
    once = benchmark.optimizer_case(optax.sgd(0.5), params, gradients)
    first, _ = once()
    for expected in (1.0, 0.5):  # gradients in turns
        stepped, _ = once()
        np.testing.assert_array_equal(stepped, jnp.full((3, 2), expected))
    assert first.is_deleted() and not params.is_deleted()


def test_parameter_sized_leaves():
    assert benchmark.parameter_sized_leaves(optax.adam(1.0)) == 2
    assert benchmark.parameter_sized_leaves(mada.mada(1.0)) == 7
    assert benchmark.parameter_sized_leaves(mada.hyper_adam(1.0)) == 3


def _scale_kernel(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def _scale(x, *, implementation):
    """A kernel of its own; it has no gradient in Pallas."""
    if implementation == "xla":
        return 2 * x
    return pl.pallas_call(
        _scale_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plt.CompilerParams(),
    )(x)


def _scale_case(interpreted, **changes):
    case = kernels.Case(
        "scale",
        _scale,
        {"cuda": interpreted},
        lambda: (jnp.arange(8.0),),
        tolerance=1e-6,
        bytes_moved=64,
    )
    return case._replace(**changes)


def test_kernel_checks_pass():
    case = _scale_case(lambda x: x + x, differentiable=True)
    checks = list(kernels.check_on_cpu(case))
    assert [check.what for check in checks] == [
        "cuda interpreted, values",
        "cuda interpreted, gradients",
        "cuda lowered",
    ]
    assert all(check.passed for check in checks), checks
    assert checks[2].measured == "__gpu$xla.gpu.triton"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x * 2.0001, "error 3.3e-05"),
        (lambda x: jnp.where(x == 3, jnp.nan, 2 * x), "error nan"),
        (lambda x: (2 * x).astype(jnp.bfloat16), "AssertionError"),
        (lambda x: 2 * x[:-1], "AssertionError"),
    ],
)
def test_kernel_checks_find_wrong_values(wrong, message):
    check, _ = kernels.check_on_cpu(_scale_case(wrong))
    assert not check.passed and check.measured.startswith(message)


def test_kernel_checks_find_wrong_gradients_and_missing_kernels():
    @jax.custom_jvp
    def wrong(x):
        return 2 * x

    wrong.defjvp(lambda primals, tangents: (wrong(*primals), 2.5 * tangents[0]))
    case = _scale_case(wrong, differentiable=True, function=lambda x, *, implementation: 2 * x)
    values, gradients, lowered = kernels.check_on_cpu(case)
    assert values.passed and not gradients.passed and not lowered.passed
    assert lowered.measured == "no Pallas call in the lowered text"
    # A kernel that does not compile is a failed check.
    (check,) = kernels.check_on_device(_scale_case(None))
    assert not check.passed and "ValueError" in check.measured


def test_errors_of_sums_are_relative_to_their_terms():
    case = _scale_case(
        lambda x: jnp.sum(x) + 1e-4,
        function=lambda x, *, implementation: jnp.sum(x),
        make_arguments=lambda: (jnp.array([100.0, -100.0]),),
    )
    assert not next(kernels.check_on_cpu(case)).passed
    case = case._replace(magnitude=lambda x: jnp.sum(jnp.abs(x)))
    assert next(kernels.check_on_cpu(case)).passed


def test_kernels_are_timed_against_their_bytes(monkeypatch):
    monkeypatch.setattr(kernels, "_COPY_BYTES", 4096)
    case = _scale_case(None, function=lambda x, *, implementation: 2 * x, bytes_moved=4096)
    timings, bound = kernels.time_case(case)
    assert set(timings) == {"pallas", "xla", "copy"}
    assert bound == pytest.approx(timings["copy"].wall.min() / 2)
    row = kernels._time_row(case)
    assert row["kernel"] == "scale" and row[""] in ("PASS", "FAIL")


def test_mada_step_is_checked_on_inputs_that_rounding_cannot_flip():
    moments, g, next_g = kernels._mada_buffers((7, 130), jnp.float32)
    assert 0 < np.mean(g == 0) < 0.2  # dead coordinates
    live = np.asarray(g) != 0
    assert np.all(np.sign(g) == np.sign(moments.lion))
    assert np.all(np.sign(g) == np.sign(next_g))
    ghat_squared = np.square(g + 0.2 * (g - moments.gradient))[live]
    v = np.asarray(moments.v)[live]
    assert np.all(np.abs(ghat_squared - v) > 0.01)
    assert 0.3 < np.mean(ghat_squared > v) < 0.7


def test_mada_step_checks_pass_and_find_a_broken_kernel():
    for case in kernels._mada_step_cases((7, 130), jnp.float32):
        assert all(check.passed for check in kernels.check_on_cpu(case))
        right = case.interpreted["cuda"]

        def wrong(*arguments, right=right):
            *others, last = jax.tree.leaves(right(*arguments))
            return [*others, last * (1 + 1e-4)]

        reference = functools.partial(case.function, implementation="xla")
        case = case._replace(
            function=lambda *arguments, f=reference, **_: jax.tree.leaves(f(*arguments)),
            interpreted={"cuda": wrong},
        )
        values, _ = kernels.check_on_cpu(case)
        assert not values.passed and values.measured.startswith("error ")


def test_givens_checks_pass_and_find_a_broken_kernel():
    case = kernels._givens_case(3, 7, 130)
    checks = list(kernels.check_on_cpu(case))
    assert len(checks) == 6 and all(check.passed for check in checks), checks
    cos, sin, matrix = case.make_arguments()
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
    rotated = functools.partial(case.function, implementation="xla")
    gram = rotated(cos, sin, matrix).T @ rotated(cos, sin, matrix)
    np.testing.assert_allclose(gram, matrix.T @ matrix, atol=1e-4)  # pairs share their angle
    case = case._replace(interpreted={"cuda": lambda *x: 1.0001 * rotated(*x)})
    assert [check.passed for check in kernels.check_on_cpu(case)] == [False, False, True]


@pytest.mark.parametrize("name", ["mada", "kernels"])
def test_modules_run(name):
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workdir" in done.stdout and "against" in done.stdout


def test_run_makes_the_folder_and_hands_on_the_status(monkeypatch, tmp_path, capsys):
    def run(folder, status):
        monkeypatch.setattr(sys, "argv", ["benchmark", f"--workdir={folder}"])
        with pytest.raises(SystemExit) as done:
            harness.run(
                "mada", "what it does", lambda directory: status if directory.is_dir() else 9
            )
        return done.value.code

    assert run(tmp_path / "a" / "b", None) is None
    assert run(tmp_path / "a" / "b", 1) == 1
    (tmp_path / "file").touch()
    assert run(tmp_path / "file", 0) == 1
    assert capsys.readouterr().err.startswith("error: ")
