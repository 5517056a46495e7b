"""An MLP on handwritten digits from a grid of initial betas: how much does a bad one hurt?"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from icmljax.data.batches import BatchIterator, shuffled_indices
from icmljax.data.digits import load_digits
from icmljax.experiments.common import app, report
from icmljax.experiments.mada.shared import (
    ADAM,
    DIGITS_RATES,
    NAMES,
    NORMALIZED_RATES,
    TEXT_RATES,
    Optimizer,
    coefficients,
)
from icmljax.nn.mlp import MLP
from icmljax.optimizers.mada import avgrad, hyper_adam, mada
from icmljax.training import loop, metrics, state


@dataclasses.dataclass(frozen=True)
class DigitsGrid:
    """An MLP on 8 x 8 digits from every pair of initial betas."""

    num_steps: int
    learning_rate: float
    arms: tuple[str, ...]
    beta1: tuple[float, ...] = (0.01, 0.3, 0.6, 0.9, 0.99)
    beta2: tuple[float, ...] = (0.501, 0.75, 0.95, 0.99)
    batch_size: int = 64
    features: tuple[int, ...] = (48, 48, 10)


def digits_optimizer(name: str, learning_rate: Any, b1: Any, b2: Any) -> Optimizer:
    """An optimizer of the digits part; betas may be traced (Lion and Adan keep their defaults)."""
    eps = 1e-6
    learn: dict[str, Any] = dict(hyper_start_step=0, eps=eps, **DIGITS_RATES)
    start = ADAM._replace(beta1=b1, beta2=b2)
    makers: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: optax.adam(learning_rate, b1, b2, eps),
        "amsgrad": lambda: optax.amsgrad(learning_rate, b1, b2, eps),
        "avgrad": lambda: avgrad(learning_rate, b1, b2, eps),
        "yogi": lambda: optax.yogi(learning_rate, b1, b2),
        "adan": lambda: optax.adan(learning_rate),
        "lion": lambda: optax.lion(learning_rate, 0.95, 0.98, weight_decay=0.0),
        "hyper_adam": lambda: hyper_adam(learning_rate, b1, b2, **learn),
        "mada": lambda: mada(learning_rate, start, **learn),
        "mada-rho0.6": lambda: mada(learning_rate, start._replace(rho=0.6), **learn),
        "mada-max": lambda: mada(learning_rate, start, second_moment="max", **learn),
        "mada-text-rates": lambda: mada(learning_rate, start, **learn | TEXT_RATES),
        "mada-normalized": lambda: mada(learning_rate, start, **learn | NORMALIZED_RATES),
    }
    return makers[name]()


def run_digits(context: app.Context[Any], name: str, optimizer: str, part: DigitsGrid) -> dict:
    """One arm: all initial betas and seeds at once, one population."""
    data = load_digits()
    seeds = context.config.seeds
    betas = np.array(list(itertools.product(part.beta1, part.beta2)), np.float32)
    b1, b2 = jnp.asarray(np.tile(betas, (seeds, 1)).T)
    keys = jax.vmap(jax.random.key)(np.repeat(np.arange(seeds), len(betas)))
    model = MLP(part.features)
    images, labels = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    schedule = optax.cosine_decay_schedule(part.learning_rate, part.num_steps)

    def loss_of(params, images, labels):
        logits = jnp.asarray(model.apply(params, images))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, jnp.mean(jnp.argmax(logits, -1) == labels)

    def loss_fn(params, batch, key):
        del key
        return loss_of(params, images[batch["rows"]], labels[batch["rows"]])[0], {}

    def start(params, key, b1, b2):
        return state.init_state(params, digits_optimizer(optimizer, schedule, b1, b2), key)

    def one_step(train_state, batch, b1, b2):
        step = state.make_train_step(
            loss_fn, digits_optimizer(optimizer, schedule, b1, b2), state_metrics=coefficients
        )
        return step(train_state, batch)

    @jax.jit
    def evaluate(train_state):
        train, _ = jax.vmap(loss_of, (0, None, None))(train_state.params, images, labels)
        test, accuracy = jax.vmap(loss_of, (0, None, None))(
            train_state.params, jnp.asarray(data.test_images), jnp.asarray(data.test_labels)
        )
        return {"train_loss": train, "test_loss": test, "test_accuracy": accuracy}

    orders = [shuffled_indices(len(images), part.batch_size, seed) for seed in range(seeds)]

    def make_batch(index):
        rows = np.stack([order(index) for order in orders])
        return {"rows": np.repeat(rows, len(betas), axis=0).astype(np.int32)}

    _, evaluation = loop.run(
        jax.jit(jax.vmap(start))(_initial_params(keys, part.features), keys, b1, b2),
        jax.jit(lambda s, batch: jax.vmap(one_step)(s, batch, b1, b2), donate_argnums=0),
        BatchIterator(make_batch, fingerprint=f"digits batch={part.batch_size} seeds={seeds}"),
        num_steps=part.num_steps,
        evaluate=evaluate,
        checkpoint_every=100,
        stop_on_nonfinite=False,  # Adam does diverge from some betas: that is a result
        **context.loop_options(name) | {"mesh": None},
    )
    return {key: np.asarray(value).tolist() for key, value in evaluation.items()}


@functools.partial(jax.jit, static_argnums=1)
def _initial_params(keys, features):
    """Of a population; all arms share what is compiled here (a vmap compiles twice as long)."""
    return jax.lax.map(lambda key: MLP(features).init(key, jnp.zeros((1, 64))), keys)


def _per_init(values, seeds):
    return np.asarray(values, np.float64).reshape(seeds, -1).mean(0)


def digits_report(part: DigitsGrid, seeds: int, results: Mapping[str, dict]):
    """Rows and verdicts of one grid; spreads are over initial betas, means over all runs."""
    rows = []
    for name, r in results.items():
        train = np.asarray(r["train_loss"], np.float64)
        diverged = ~(train <= np.log(10))  # worse than guessing, or not finite
        inits = _per_init(train, seeds)
        rows.append(
            {
                "optimizer": name,
                "train loss": report.mean_and_standard_error(train),
                "std over betas": float(np.std(inits)),
                "worst": float(np.max(inits)),
                "test loss": report.mean_and_standard_error(r["test_loss"]),
                "accuracy": report.mean_and_standard_error(r["test_accuracy"]),
                "diverged": int(np.sum(diverged)),
            }
        )
    verdicts = []
    if part.num_steps >= 300 and {"mada", "hyper_adam", "adam"} <= results.keys():
        mada_r, hyper_r, adam_r = (results[n] for n in ("mada", "hyper_adam", "adam"))

        def ratio(key):
            estimate, low, high = report.paired_bootstrap(
                mada_r[key], hyper_r[key], statistic=report.ratio_of_means
            )
            return estimate, f"{estimate:.3f}, 95% in [{low:.3f}, {high:.3f}]"

        where = f"digits, lr {part.learning_rate:g}: "
        train, measured = ratio("train_loss")
        bar = where + "MADA train loss <= 0.75 x HyperAdam"
        verdicts.append(report.Verdict(bar, measured, train <= 0.75))
        test, measured = ratio("test_loss")
        bar = where + "MADA test loss <= 1.1 x HyperAdam"
        verdicts.append(report.Verdict(bar, measured, test <= 1.1))
        bad = int(np.sum(~np.isfinite(np.asarray(mada_r["train_loss"], np.float64))))
        bar = where + "no MADA run ends non-finite"
        verdicts.append(report.Verdict(bar, f"{bad} of {len(mada_r['train_loss'])}", bad == 0))
        if part.learning_rate == 1e-3:
            spread = np.std(_per_init(mada_r["train_loss"], seeds)) / np.std(
                _per_init(adam_r["train_loss"], seeds)
            )
            bar = where + "spread over initial betas <= 0.5 x Adam"
            verdicts.append(report.Verdict(bar, f"{spread:.3f}", spread <= 0.5))
    return rows, verdicts


def digits_panels(context, grid, results) -> dict[str, dict[str, report.Curve]]:
    """Training loss and coefficients, mean over the population."""
    panels: dict[str, dict[str, report.Curve]] = {}
    for name in results:
        for label, key in [("training loss", "loss"), *((n, n) for n in NAMES)]:
            if label == "training loss" or name.startswith("mada"):
                steps, values = metrics.read_metrics(context.arm(f"{grid}/{name}"), key)
                panels.setdefault(label, {})[name] = report.Curve(steps, values)
    return panels
