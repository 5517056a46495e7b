"""The online problem of Reddi et al. (2018) on which Adam goes to the wrong end."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from icmljax.data.batches import BatchIterator
from icmljax.experiments.common import app, report
from icmljax.experiments.mada.shared import ADAM, NAMES, Optimizer, coefficients
from icmljax.optimizers.mada import avgrad, mada
from icmljax.training import loop, metrics, state


@dataclasses.dataclass(frozen=True)
class CounterExample:
    """Reddi et al.: gradient 1010 once in 101 steps and -10 otherwise, x kept in [-1, 1]."""

    num_steps: int
    arms: tuple[str, ...] = (
        "adam",
        "amsgrad",
        "amsgrad-optax",
        "avgrad",
        "mada",
        "mada-max",
        "mada-rho-only",
    )
    chunk: int = 10_000  # optimizer steps in one step of the loop
    learning_rate: float = 1e-3


def counterexample_optimizer(name: str, learning_rate: float) -> Optimizer:
    """An optimizer of the counter-example, betas (0.9, 0.99)."""
    b1, b2 = 0.9, 0.99
    learn: dict[str, Any] = dict(
        hyper_learning_rate=dict(beta3=0.1, rho=0.1, c=0.1),
        hyper_momentum=dict(beta3=0.9, rho=0.9, c=0.9),
        hyper_start_step=0,
        hyper_grad_clip=None,
    )
    start = ADAM._replace(beta1=b1, beta2=b2)
    fixed = ("beta1", "beta2", "gamma")
    makers: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: optax.adam(learning_rate, b1, b2),
        "amsgrad": lambda: mada(
            learning_rate, start._replace(rho=0.0), frozen=NAMES, second_moment="max"
        ),
        "amsgrad-optax": lambda: optax.amsgrad(learning_rate, b1, b2),
        "avgrad": lambda: avgrad(learning_rate, b1, b2),
        "mada": lambda: mada(learning_rate, start, frozen=fixed, **learn),
        "mada-max": lambda: mada(learning_rate, start, frozen=fixed, second_moment="max", **learn),
        "mada-rho-only": lambda: mada(learning_rate, start, frozen=(*fixed, "beta3", "c"), **learn),
    }
    return makers[name]()


def run_counterexample(context: app.Context[Any], name: str, part: CounterExample) -> dict:
    """One arm: follows x through ``num_steps`` steps, in float64."""
    optimizer = counterexample_optimizer(name, part.learning_rate)

    def one(carry, t):
        x, opt_state = carry
        g = jnp.where(t % 101 == 1, 1010.0, -10.0).astype(x.dtype)
        updates, opt_state = optimizer.update(g, opt_state, x)
        return (jnp.clip(optax.apply_updates(x, updates), -1, 1), opt_state), g * x

    @jax.jit
    def step(train_state, batch):
        t = batch["chunk"] * part.chunk + jnp.arange(1, part.chunk + 1)
        carry = train_state.params, train_state.opt_state
        (x, opt_state), losses = jax.lax.scan(one, carry, t)
        new = state.TrainState(train_state.step + 1, x, opt_state, train_state.key)
        return new, {"loss": jnp.mean(losses), "x": x} | coefficients(new)

    jax.config.update("jax_enable_x64", True)  # a step moves x by a millionth of it
    try:
        start = state.TrainState(
            jnp.zeros((), jnp.int32), x := jnp.zeros(()), optimizer.init(x), jax.random.key(0)
        )
        loop.run(
            start,
            step,
            BatchIterator(
                lambda i: {"chunk": np.asarray(i, np.int32)}, fingerprint=f"chunks of {part.chunk}"
            ),
            num_steps=part.num_steps // part.chunk,
            log_every=1,
            checkpoint_every=10,
            **context.loop_options(f"counterexample/{name}") | {"mesh": None},
        )
    finally:
        jax.config.update("jax_enable_x64", False)
    directory = context.arm(f"counterexample/{name}")
    steps, path = metrics.read_metrics(directory, "x")
    result = {"steps": (steps * part.chunk).tolist(), "x": path.tolist()}
    if name.startswith("mada"):
        result["rho"] = metrics.read_metrics(directory, "rho")[1].tolist()
    return result


def counterexample_report(part: CounterExample, results: Mapping[str, dict]):
    """Rows, verdicts and plot panels of the counter-example."""
    rows, verdicts = [], []
    for name, r in results.items():
        row = {"optimizer": name, f"x({r['steps'][-1]:.0e})": r["x"][-1]}
        rows.append(row | ({"rho": r["rho"][-1]} if "rho" in r else {}))
    panels = {"x": {n: report.Curve(r["steps"], r["x"]) for n, r in results.items()}}
    if part.num_steps >= 1_000_000:
        for name, bar, passed in (
            ("adam", "Adam goes to the wrong end: x > 0.9", lambda r: r["x"][-1] > 0.9),
            ("avgrad", "AVGrad goes to the right end: x < -0.9", lambda r: r["x"][-1] < -0.9),
        ):
            if name in results:
                measured = f"{results[name]['x'][-1]:.3f}"
                verdicts.append(report.Verdict(bar, measured, passed(results[name])))
        if "mada" in results:
            r = results["mada"]
            at = r["steps"].index(100_000)
            passed = r["rho"][at] < 0.05 and r["x"][-1] < r["x"][at] - 0.3
            measured = f"rho {r['rho'][at]:.3f}, x {r['x'][at]:.3f} -> {r['x'][-1]:.3f}"
            bar = "MADA finds AVGrad: rho(1e5) < 0.05, x(1e6) < x(1e5) - 0.3"
            verdicts.append(report.Verdict(bar, measured, passed))
    return rows, verdicts, panels
