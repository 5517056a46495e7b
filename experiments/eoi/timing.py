"""Time to initialise a square matrix, against a dense orthogonal one by QR in the same run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icmljax.experiments.benchmarks import harness
from icmljax.experiments.common import report
from icmljax.initializers import eoi

# Seconds of the authors' PyTorch code, one thread of another machine; the last two from the time of
# a single rotation.
_OFFICIAL = {512: 0.98, 1024: 9.4, 2048: 115.0, 4096: 900.0}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Sizes of the matrices."""

    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    density: float = 0.125
    rounds: int = 3


def run_timing(part: Timing) -> dict[str, list]:
    """Seconds by method, size and round, and of the first call (compilation) by method and size."""
    makers = {
        "eoi": eoi.orthogonal(part.density),
        "qr": jax.nn.initializers.orthogonal(),
    }
    result: dict[str, list] = {}
    for size in part.sizes:

        def case(init, size=size):
            jitted = jax.jit(lambda key: init(key, (size, size), jnp.float32))
            key = jax.random.key(0)
            return lambda: jax.block_until_ready(jitted(key))

        timings = harness.compare(
            {name: case(init) for name, init in makers.items()}, rounds=part.rounds, warmup=0
        )
        for name, timing in timings.items():
            result.setdefault(name, []).append(timing.wall.tolist())
            result.setdefault(f"{name} first call", []).append(timing.first)
    return result


def timing_report(part: Timing, result: Mapping[str, list]):
    """Rows, verdicts and plot panels; the smallest time of all rounds counts."""
    best = {name: np.min(result[name], axis=1) for name in ("eoi", "qr")}
    rows: list[dict[str, Any]] = []
    for i, size in enumerate(part.sizes):
        rows.append(
            {
                "size": size,
                "EOI s": float(best["eoi"][i]),
                "QR (dense) s": float(best["qr"][i]),
                "EOI / QR": float(best["eoi"][i] / best["qr"][i]),
                "EOI first call s": float(result["eoi first call"][i]),
                "authors' code s": _OFFICIAL.get(size, ""),
            }
        )
    panels = {
        "seconds": {
            "EOI": report.Curve(part.sizes, best["eoi"]),
            "QR (dense)": report.Curve(part.sizes, best["qr"]),
            "authors' code": report.Curve(list(_OFFICIAL), list(_OFFICIAL.values())),
        }
    }
    verdicts = []
    if 4096 in part.sizes:
        seconds, qr = (float(best[n][part.sizes.index(4096)]) for n in ("eoi", "qr"))
        bar = "timing: 4096 x 4096 in <= 5 s, and faster than QR"
        measured = f"{seconds:.2f} s, QR {qr:.2f} s"
        verdicts.append(report.Verdict(bar, measured, seconds <= 5 and seconds < qr))
    return rows, verdicts, panels
