"""What MADA costs, against optax.adam, optax.adan and a naive port.

    python -m experiments.benchmarks.mada

Two comparisons, each in a process of its own: the optimizer alone at a million parameters on one
thread, and the training of a small character language model on all threads.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from icmljax.data import text
from icmljax.experiments.benchmarks import harness
from icmljax.experiments.common import report
from icmljax.kernels import mada_step
from icmljax.nn import gpt
from icmljax.nn.cross_entropy import cross_entropy
from icmljax.optimizers import mada
from icmljax.training import state as train_state

_OPTIMIZER_ROUNDS = 60
_CHAR_LM_ROUNDS = 150
_LEARNING_RATE = 1e-3
_SHAPE = (1000, 1000)
_NUM_SMALL = 200  # leaves of 5000 elements: as many parameters in all
_MAX_TIME = 6.0  # x optax.adam
_MAX_LEAVES = 7  # of the size of the parameters
_MAX_MANY_LEAVES = 1.5  # x one leaf
_MIN_STEP_RATE = 0.85  # x optax.adam

_OPTIMIZER_BARS = (
    harness.Bar("optax.adan", "optax.adam"),
    harness.Bar("mada", "optax.adam", _MAX_TIME),
    harness.Bar("hyper_adam", "optax.adam"),
    harness.Bar("mada, all frozen", "optax.adam"),
    harness.Bar("naive vjp port", "optax.adam"),
    harness.Bar("optax.adam, 200 leaves", "optax.adam"),
    harness.Bar("optax.flatten(mada), 200 leaves", "mada", _MAX_MANY_LEAVES),
    harness.Bar("mada, 200 leaves", "mada"),
)


class NaiveState(NamedTuple):
    """State of `naive_mada`: as that of MADA."""

    count: Any
    hyper: mada_step.MadaHyperparams
    moments: Any  # one Moments per leaf
    gradient: Any


def naive_mada(learning_rate: float) -> optax.GradientTransformation:
    """MADA as one would port the authors' code: autodiff of the whole step by its coefficients.

    The step is the library's; what is compared is how its derivative is taken. For a constant
    learning rate, all six coefficients, no momentum and no warm-up.
    """
    rule = mada_step.Rule()

    def scalars(hyper, count):
        return mada_step.step_scalars(hyper, count, 1e-6, 0.95, 0.98, jnp.float32)

    def init(params):
        def empty(p):  # v and vbar do not start at 0, where the root has no derivative
            values = dict.fromkeys(mada_step.Moments._fields, 0.0) | dict(v=1e-15, vbar=1e-15)
            return mada_step.Moments(**{k: jnp.full_like(p, x) for k, x in values.items()})

        return NaiveState(
            count=jnp.zeros((), jnp.int32),
            hyper=jax.tree.map(jnp.array, mada.DEFAULT_INIT),
            moments=jax.tree.map(empty, params),
            gradient=jax.tree.map(jnp.zeros_like, params),
        )

    def update(gradients, state, params=None):
        del params
        first = state.count == 0
        last = jnp.maximum(state.count, 1)

        def hyper_gradient(moments, g, next_g):
            def direction(hyper):
                return mada_step.inner_step(moments, g, scalars(hyper, last), rule)[1]

            _, pull_back = jax.vjp(direction, state.hyper)
            (gradient,) = pull_back(-learning_rate * next_g)
            return gradient

        def step(moments, g, next_g):
            after, _ = mada_step.inner_step(moments, g, scalars(state.hyper, last), rule)
            moments = jax.tree.map(lambda old, new: jnp.where(first, old, new), moments, after)
            moments = mada_step.begin(moments, next_g, first, rule)
            return moments, mada_step.inner_step(moments, next_g, scalars(hyper, count), rule)[1]

        moments = jax.tree.leaves(state.moments, is_leaf=lambda x: isinstance(x, mada_step.Moments))
        trees = map(jax.tree.leaves, (state.gradient, gradients))
        leaves = list(zip(moments, *trees, strict=True))
        per_leaf = [hyper_gradient(*leaf) for leaf in leaves]
        total = jax.tree.map(lambda *parts: sum(parts), *per_leaf)
        hyper = mada_step.MadaHyperparams(
            *(
                jnp.where(first, h, jnp.clip(h - rate * jnp.clip(hg, -10, 10), low, high))
                for h, rate, hg, (low, high) in zip(
                    state.hyper, mada.DEFAULT_HYPER_LEARNING_RATE, total, mada.BOX, strict=True
                )
            )
        )
        count = state.count + 1
        stepped = [step(*leaf) for leaf in leaves]
        tree = jax.tree.structure(gradients)
        moments = jax.tree.unflatten(tree, [after for after, _ in stepped])
        updates = jax.tree.unflatten(tree, [-learning_rate * d for _, d in stepped])
        return updates, NaiveState(count, hyper, moments, gradients)

    return optax.GradientTransformation(init, update)


def optimizer_case(
    optimizer: optax.GradientTransformation, params: Any, gradients: Any
) -> Callable[[], Any]:
    """A function that updates a copy of the parameters; it takes the gradients in turns.

    It returns parameters and optimizer state, which its next call donates.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, gradients):
        params, opt_state = carry
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.copy, params)
    return _stepper(step, (params, optimizer.init(params)), gradients)


def _stepper(step, carry, inputs) -> Callable[[], Any]:
    """A function that does one step of an endless loop over the inputs; returns the state."""
    endless = itertools.cycle(inputs)

    def once():
        nonlocal carry
        carry = jax.block_until_ready(step(carry, next(endless)))
        return carry

    return once


def compare_optimizers() -> tuple[dict[str, harness.Timing], dict[str, Any]]:
    """Times one update of a million float32 parameters, each way."""
    keys = jax.random.split(jax.random.key(0), 3)
    one, *one_gradients = (jax.random.normal(key, _SHAPE) for key in keys)
    many, *many_gradients = (list(x.reshape(_NUM_SMALL, -1)) for x in (one, *one_gradients))
    lr = _LEARNING_RATE
    single = {
        "optax.adam": optax.adam(lr),
        "optax.adan": optax.adan(lr),
        "mada": mada.mada(lr),
        "hyper_adam": mada.hyper_adam(lr),
        "mada, all frozen": mada.mada(lr, frozen=mada.NAMES),
        "naive vjp port": naive_mada(lr),
    }
    split = {
        "optax.adam, 200 leaves": optax.adam(lr),
        "optax.flatten(mada), 200 leaves": optax.flatten(mada.mada(lr)),
        "mada, 200 leaves": mada.mada(lr),
    }
    cases = {k: optimizer_case(x, one, one_gradients) for k, x in single.items()}
    cases |= {k: optimizer_case(x, many, many_gradients) for k, x in split.items()}
    return harness.compare(cases, rounds=_OPTIMIZER_ROUNDS), harness.machine()


def compare_char_lm() -> tuple[dict[str, harness.Timing], dict[str, Any]]:
    """Times one training step of a small GPT on the standard library's sources."""
    config = gpt.GPTConfig(vocab_size=256, block_size=64, num_layers=2, num_heads=4, d_model=64)
    model = gpt.GPT(config)
    tokens = text.byte_tokens(text.standard_library_text(max_bytes=2**20))
    iterator = text.token_batches(
        tokens.train, batch_size=16, block_size=64, seed=0, fingerprint=tokens.fingerprint
    )
    batches = jax.device_put(list(itertools.islice(iterator, 32)))
    params = model.init(jax.random.key(0), batches[0]["inputs"])

    def loss_fn(params, batch, key):
        del key
        logits: Any = model.apply(params, batch["inputs"])
        return cross_entropy(logits, batch["targets"]), {}

    def case(optimizer):
        step = train_state.make_train_step(loss_fn, optimizer)
        jitted = jax.jit(lambda state, batch: step(state, batch)[0], donate_argnums=0)
        # Copies, as the state is donated.
        copy = jax.tree.map(jnp.copy, params)
        start = train_state.init_state(copy, optimizer, jax.random.key(1))
        return _stepper(jitted, start, batches)

    lr = _LEARNING_RATE
    cases = {"optax.adam": case(optax.adam(lr)), "mada": case(mada.mada(lr))}
    return harness.compare(cases, rounds=_CHAR_LM_ROUNDS), harness.machine()


def parameter_sized_leaves(optimizer: optax.GradientTransformation) -> int:
    """Number of arrays in the optimizer's state that are as large as the parameters."""
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct(_SHAPE, jnp.float32))
    return sum(leaf.shape == _SHAPE for leaf in jax.tree.leaves(state))


def main(directory: pathlib.Path) -> None:
    """Runs both comparisons and prints the verdicts."""
    timings, machine = harness.in_new_process(compare_optimizers, one_thread=True)
    rows, verdicts = harness.rows(timings, clock="cpu", bars=_OPTIMIZER_BARS)
    print(harness.machine_line(machine))
    title = "one update of 1,000,000 float32 parameters, one thread"
    report.table(rows, title=title, path=directory / "optimizers.md")

    leaves = {
        "optax.adam": parameter_sized_leaves(optax.adam(_LEARNING_RATE)),
        "mada": parameter_sized_leaves(mada.mada(_LEARNING_RATE)),
        "hyper_adam": parameter_sized_leaves(mada.hyper_adam(_LEARNING_RATE)),
    }
    report.table([{"state": "parameter-sized leaves"} | leaves])
    claim = f"parameter-sized leaves in the state of mada <= {_MAX_LEAVES}"
    verdicts.append(report.Verdict(claim, str(leaves["mada"]), leaves["mada"] <= _MAX_LEAVES))

    lm_timings, lm_machine = harness.in_new_process(compare_char_lm)
    lm_rows, _ = harness.rows(lm_timings, clock="wall", bars=[harness.Bar("mada", "optax.adam")])
    for row, timing in zip(lm_rows, lm_timings.values(), strict=True):
        row["steps/s"] = float(1 / np.median(timing.wall))
    print(harness.machine_line(lm_machine))
    title = "one training step of a 2-layer, 64-wide GPT on 16 x 64 bytes, all threads"
    report.table(lm_rows, title=title, path=directory / "char_lm.md")
    # A rate is a matter of all steps, not of the fastest: the median over the paired rounds.
    rate = float(np.median(lm_timings["optax.adam"].wall / lm_timings["mada"].wall))
    claim = f"steps/s of the char LM with mada >= {_MIN_STEP_RATE} x optax.adam"
    verdicts.append(report.Verdict(claim, f"{rate:.3f} x", rate >= _MIN_STEP_RATE))

    report.conclude(
        directory,
        results={
            "optimizers": {"machine": machine, "timings": harness.as_json(timings)},
            "char_lm": {"machine": lm_machine, "timings": harness.as_json(lm_timings)},
            "parameter_sized_leaves": leaves,
        },
        verdicts=verdicts,
        files=[directory / "optimizers.md", directory / "char_lm.md"],
    )


if __name__ == "__main__":
    harness.run("mada", __doc__, main)
