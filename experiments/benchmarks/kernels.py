"""Every Pallas kernel against its XLA reference: does it agree, and what does it gain?

    python -m experiments.benchmarks.kernels

On an accelerator each kernel is run, compared (values; gradients where it has them; odd sizes;
bfloat16 buffers) and timed against XLA and against the time that its bytes need at the bandwidth of
a large copy. On a CPU host it is run in interpret mode and lowered for TPU and CUDA instead. Exit
status 1 when a check fails; a missed time bar is only reported.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from icmljax.experiments.benchmarks import harness
from icmljax.experiments.common import report
from icmljax.kernels import givens, mada_step
from icmljax.kernels.mada_step import pallas
from icmljax.optimizers import mada

_ROUNDS = 20
_CALLS = 5  # per round: the host's share of a call must not count
_COPY_BYTES = 2**29
_MAX_BOUND = 1.5  # x the time that the bytes need

# In the lowered text, what stands for a kernel.
_CUSTOM_CALLS = {"tpu": ("tpu_custom_call",), "cuda": ("__gpu$xla.gpu.triton", "mosaic_gpu")}

_DEVICES = {
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
    "cuda": AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu"),
}


class Case(NamedTuple):
    """One kernel on one set of inputs.

    Attributes:
      name: kernel, shape, dtypes.
      function: ``function(*arguments, implementation=...) -> arrays``.
      interpreted: by platform ("tpu", "cuda"), the Pallas kernel as ``f(*arguments) -> arrays`` in
        interpret mode.
      make_arguments: makes the arrays (a call away, for the large ones are needed one at a time).
      tolerance: largest error that passes, relative to the element and to the mean of its array.
      bytes_moved: of memory traffic that it cannot avoid.
      magnitude: ``f(*arguments)``: what the errors are relative to instead, an array per output;
        for sums, the sums of magnitudes.
      differentiable: whether gradients by all arguments are compared, too.
    """

    name: str
    function: Callable[..., Any]
    interpreted: Mapping[str, Callable[..., Any]]
    make_arguments: Callable[[], tuple[Any, ...]]
    tolerance: float
    bytes_moved: int
    magnitude: Callable[..., Any] | None = None
    differentiable: bool = False


class Kernel(NamedTuple):
    """The cases of a kernel: small and odd ones to check, large ones to time."""

    checked: tuple[Case, ...]
    timed: tuple[Case, ...]


class Check(NamedTuple):
    """Outcome of one check."""

    case: str
    what: str
    measured: str
    passed: bool


# ------------------------------------------------------------------------------------- kernels


def mada_step_kernel() -> Kernel:
    """The two passes of MADA's step."""
    odd = [(3,), (1025,), (7, 130), (300, 1), (5, 33, 129)]
    small = [(shape, jnp.float32) for shape in odd] + [((130, 520), jnp.bfloat16)]
    large = [((2**12, 2**13), jnp.float32), ((2**12, 2**13), jnp.bfloat16)]
    checked = [case for shape, dtype in small for case in _mada_step_cases(shape, dtype)]
    timed = [case for shape, dtype in large for case in _mada_step_cases(shape, dtype)]
    return Kernel(tuple(checked), tuple(timed))


def _mada_step_cases(shape: tuple[int, ...], dtype: Any) -> Iterator[Case]:
    """Moments and gradients in ``dtype``; the arithmetic is float32."""
    rule = mada_step.Rule()
    hyper = mada_step.MadaHyperparams(0.9, 0.95, 0.2, 0.6, 0.7, 0.8)

    def scalars(count):
        values = jax.tree.map(jnp.float32, hyper)
        return mada_step.step_scalars(values, jnp.int32(count), 1e-6, 0.95, 0.98, jnp.float32)

    def make_arguments():
        return _mada_buffers(shape, dtype)

    def widened(leaf):
        return jax.tree.map(lambda x: x.astype(jnp.float32), leaf)

    def sums(moments, g, next_g, *, implementation):
        leaf = [moments], [g], [next_g]
        return mada_step.hyper_gradient_sums(
            *leaf, scalars(5), rule, mada.NAMES, implementation=implementation
        )

    def interpreted_sums(worker, *leaf):
        return worker(scalars(5), widened(leaf), rule, mada.NAMES, interpret=True)

    def sums_of_magnitudes(*leaf):
        moments, g, next_g = widened(leaf)
        terms = mada_step.direction_gradient(moments, g, scalars(5), rule, mada.NAMES)
        return [jnp.sum(jnp.abs(next_g * x)) for x in terms]

    def lagged(moments, g, next_g, *, implementation):
        leaf = [moments], [g], [next_g]
        first = jnp.array(False)
        return mada_step.lagged_step(
            *leaf, scalars(5), scalars(6), rule, first, implementation=implementation
        )

    def interpreted_lagged(worker, *leaf):
        both = scalars(5), scalars(6), jnp.float32(False)
        after, direction = worker(both, leaf, rule, interpret=True)
        return [after], [direction]

    size, width = math.prod(shape), jnp.dtype(dtype).itemsize
    label = f"{'x'.join(map(str, shape))} {jnp.dtype(dtype).name}"
    yield Case(
        f"mada_step.hyper_gradient_sums {label}",
        sums,
        _partials(interpreted_sums, tpu=pallas.tpu_sums, cuda=pallas.gpu_sums),
        make_arguments,
        tolerance=1e-5,
        bytes_moved=8 * width * size,
        magnitude=sums_of_magnitudes,
    )
    yield Case(
        f"mada_step.lagged_step {label}",
        lagged,
        _partials(interpreted_lagged, tpu=pallas.tpu_lagged, cuda=pallas.gpu_lagged),
        make_arguments,
        # A buffer stored in bfloat16 may be rounded to the neighbouring number.
        tolerance=1e-5 if dtype == jnp.float32 else 2**-7,
        bytes_moved=(14 * width + 4) * size,
    )


def _partials(function, **first):
    return {platform: functools.partial(function, worker) for platform, worker in first.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mada_buffers(shape, dtype):
    """Buffers and two gradients on which rounding cannot flip a sign; every 7th coordinate dead."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    uniform = functools.partial(jax.random.uniform, shape=shape)
    alive = jnp.arange(math.prod(shape)).reshape(shape) % 7 != 3
    base = jax.random.rademacher(next(keys), shape, jnp.float32) * alive
    base *= uniform(next(keys), minval=0.5, maxval=1.5)
    previous, g, next_g = (base * uniform(next(keys), minval=0.9, maxval=1.1) for _ in range(3))
    v = jnp.where(uniform(next(keys)) < 0.5, 0.05, 5.0) * alive
    moments = mada_step.Moments(
        m=0.5 * base,
        v=v,
        vbar=v * uniform(next(keys), minval=0.5, maxval=1.0),
        n=0.1 * jnp.roll(base, 1) * alive,
        lion=base * uniform(next(keys), minval=0.5, maxval=1.0),
        gradient=previous,
    )
    return jax.tree.map(lambda x: x.astype(dtype), (moments, g, next_g))


def givens_kernel() -> Kernel:
    """Levels of rotations: as many as an orthogonal matrix of 12.5 % density takes."""
    small = [(2, 1, 5), (3, 7, 130), (4, 37, 1100), (3, 300, 20)]
    large = [(25, 1024, 1024), (30, 4096, 4096)]
    checked, timed = (tuple(_givens_case(*shape) for shape in shapes) for shapes in (small, large))
    return Kernel(checked, timed)


def _givens_case(levels: int, n: int, m: int) -> Case:
    partner, rows = _givens_partners(levels, n), np.arange(n)

    def rotated(*arguments, implementation):
        return givens.givens_levels(jnp.asarray(partner), *arguments, implementation=implementation)

    def interpreted(worker, *arguments):
        run = functools.partial(worker, interpret=True)
        return givens.with_gradient(run, jnp.asarray(partner), *arguments)

    def make_arguments():
        angle = jnp.cos(jnp.arange(1, levels + 1)[:, None] * (rows + partner))  # of both rows
        sin = jnp.sign(partner - rows) * jnp.sin(angle)
        cos = jnp.where(partner == rows, 1, jnp.cos(angle))
        return cos, sin, jax.random.normal(jax.random.key(0), (n, m))

    return Case(
        f"givens.givens_levels {levels} x {n}x{m} float32",
        rotated,
        _partials(interpreted, tpu=givens.tpu, cuda=givens.gpu),
        make_arguments,
        tolerance=1e-5,
        bytes_moved=8 * n * m + 12 * levels * n,
        differentiable=True,
    )


def _givens_partners(levels: int, n: int) -> np.ndarray:
    """Random pairs in each level; at least one row in ten rests."""
    rng = np.random.default_rng(0)
    partner = np.tile(np.arange(n, dtype=np.int32), (levels, 1))
    for row in partner:
        i, j = rng.permutation(n)[: 2 * int(0.45 * n)].reshape(2, -1)
        row[i], row[j] = j, i
    return partner


KERNELS: Mapping[str, Callable[[], Kernel]] = {
    "givens": givens_kernel,
    "mada_step": mada_step_kernel,
}


# -------------------------------------------------------------------------------------- checks


def check_on_device(case: Case) -> Iterator[Check]:
    """Runs the Pallas kernel and compares it with XLA."""
    yield from _agreements(case, "device", _implementation(case, "pallas"))


def check_on_cpu(case: Case) -> Iterator[Check]:
    """Interprets the Pallas kernels and compares them with XLA; lowers them for real."""
    for platform, interpreted in case.interpreted.items():
        yield from _agreements(case, f"{platform} interpreted", interpreted)
        lowers = functools.partial(_lowers, case, platform)
        yield _attempt(case, f"{platform} lowered", lowers)


def _agreements(case: Case, where: str, pallas: Callable[..., Any]) -> Iterator[Check]:
    arguments, xla = case.make_arguments(), _implementation(case, "xla")
    yield _attempt(
        case,
        f"{where}, values",
        lambda: _error(arguments, pallas, xla, case.tolerance, case.magnitude),
    )
    if case.differentiable:
        gradients = _gradient(pallas), _gradient(xla)
        yield _attempt(
            case, f"{where}, gradients", lambda: _error(arguments, *gradients, case.tolerance)
        )


def _implementation(case: Case, name: str) -> Callable[..., Any]:
    return functools.partial(case.function, implementation=name)


def _attempt(case: Case, what: str, measure: Callable[[], tuple[str, bool]]) -> Check:
    try:
        return Check(case.name, what, *measure())
    except Exception as error:  # a kernel that does not compile is a result, not the end
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Check(case.name, what, f"{type(error).__name__}: {first_line[:100]}", False)


def _error(arguments, function, reference, tolerance: float, magnitude=None) -> tuple[str, bool]:
    """Largest relative error, and whether it is tolerated."""
    got, expected = (jax.jit(f)(*arguments) for f in (function, reference))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    got, expected = (_float64_leaves(tree) for tree in (got, expected))
    if magnitude is None:
        scales = [np.abs(x) + np.abs(x).mean() for x in expected]
    else:
        scales = _float64_leaves(jax.jit(magnitude)(*arguments))
    tiny = np.finfo(np.float32).tiny
    errors = [
        np.max(np.abs(a - b) / np.maximum(scale, tiny))
        for a, b, scale in zip(got, expected, scales, strict=True)
    ]
    error = float(np.max(errors))  # NaN stays NaN, and fails
    return f"error {error:.1e} <= {tolerance:.1e}", error <= tolerance


def _float64_leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def _gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of squares of all that a function returns, by all arguments."""

    def total(arguments):
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(function(*arguments)))

    return lambda *arguments: jax.grad(total)(arguments)


def _lowers(case: Case, platform: str) -> tuple[str, bool]:
    lowered = lowered_text(_implementation(case, "pallas"), case.make_arguments(), platform)
    found = [name for name in _CUSTOM_CALLS[platform] if name in lowered]
    return (found[0], True) if found else ("no Pallas call in the lowered text", False)


def lowered_text(function: Callable[..., Any], arguments: tuple[Any, ...], platform: str) -> str:
    """What a function is lowered to for "tpu" or "cuda", on any host."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    # Some primitives are lowered differently for each generation of a device: name one.
    mesh = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=_DEVICES[platform]
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


# --------------------------------------------------------------------------------------- times


def time_case(case: Case) -> tuple[dict[str, harness.Timing], float]:
    """Times Pallas, XLA and a large copy in turns.

    Returns:
      Timings (of five calls each) and the time that the kernel's bytes need, in the same unit.
    """
    arguments = case.make_arguments()
    block = jnp.zeros(_COPY_BYTES // 4, jnp.float32)
    cases = {
        "pallas": _repeated(_implementation(case, "pallas"), arguments),
        "xla": _repeated(_implementation(case, "xla"), arguments),
        "copy": _repeated(lambda x: x + 1, (block,)),
    }
    timings = harness.compare(cases, rounds=_ROUNDS)
    return timings, timings["copy"].wall.min() * case.bytes_moved / (2 * _COPY_BYTES)


def _repeated(function, arguments) -> Callable[[], None]:
    jitted = jax.jit(function)

    def calls():
        for _ in range(_CALLS):
            out = jitted(*arguments)
        jax.block_until_ready(out)

    return calls


def _time_row(case: Case) -> dict[str, Any]:
    timings, bound = time_case(case)
    pallas, xla = (timings[name].wall.min() for name in ("pallas", "xla"))
    return {
        "kernel": case.name,
        "Pallas ms": 1e3 * pallas / _CALLS,
        "XLA ms": 1e3 * xla / _CALLS,
        "bytes bound ms": 1e3 * bound / _CALLS,
        "Pallas / XLA": float(pallas / xla),
        "Pallas / bound": float(pallas / bound),
        "copy GB/s": float(2e-9 * _COPY_BYTES * _CALLS / timings["copy"].wall.min()),
        "first call s": timings["pallas"].first,
        "bar": f"<= {_MAX_BOUND} x bound",
        "": "PASS" if pallas <= _MAX_BOUND * bound else "FAIL",
    }


def main(directory: pathlib.Path) -> int:
    """Checks all kernels, and times them where there is an accelerator."""
    started = time.perf_counter()
    machine = harness.machine()
    print(harness.machine_line(machine))
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        print("no accelerator here: interpret mode and lowering for TPU and CUDA only, no times")
    kernels = [make() for make in KERNELS.values()]

    check = check_on_cpu if on_cpu else check_on_device
    checks = [done for kernel in kernels for case in kernel.checked for done in check(case)]
    rows = [
        {"kernel": c.case, "check": c.what, "": "PASS" if c.passed else "FAIL", "got": c.measured}
        for c in checks
    ]
    files = [directory / "checks.md"]
    report.table(rows, title="Pallas against XLA", path=files[0])

    times = []
    if not on_cpu:
        times = [_time_row(case) for kernel in kernels for case in kernel.timed]
        files.append(directory / "times.md")
        report.table(times, title="smallest wall time of a call", path=files[1])

    failed = sum(not c.passed for c in checks)
    claim = f"{len(checks)} checks of {len(kernels)} kernel(s)"
    verdicts = [report.Verdict(claim, f"{failed} failed", failed == 0)]
    verdicts += [
        report.Verdict(
            f"{row['kernel']} {row['bar']}", f"{row['Pallas / bound']:.2f} x", row[""] == "PASS"
        )
        for row in times
    ]
    results = {
        "machine": machine,
        "checks": [c._asdict() for c in checks],
        "times": times,
        "seconds": time.perf_counter() - started,
    }
    report.conclude(directory, results=results, verdicts=verdicts, files=files)
    return 1 if failed else 0


if __name__ == "__main__":
    harness.run("kernels", __doc__, main)
