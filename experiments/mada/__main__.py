"""MADA against its corners and its baselines: a counter-example, digits, and language modelling.

Part ``counterexample`` is the online problem of Reddi et al. on which Adam goes the wrong way.
Part ``digits`` trains an MLP from a grid of initial betas: how much does a bad one hurt?
Part ``text`` trains a GPT, on the Python standard library's sources, on any text, or (preset
``paper``) GPT-2 on OpenWebText as nanoGPT prepares it (``--data_dir`` with train.bin, val.bin).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from icmljax.experiments.common import app, report
from icmljax.experiments.common.arms import run_arms
from icmljax.experiments.mada.counterexample import (
    CounterExample,
    counterexample_report,
    run_counterexample,
)
from icmljax.experiments.mada.digits import DigitsGrid, digits_panels, digits_report, run_digits
from icmljax.experiments.mada.text import Text, dry_run, load_tokens, run_text, text_report
from icmljax.nn import gpt
from icmljax.optimizers.mada import MadaHyperparams

_NUM_STEPS = flags.DEFINE_integer(
    "num_steps", None, "steps of the text part; default: the preset's", lower_bound=1
)
_PRECISION = flags.DEFINE_enum(
    "precision", None, ["f32", "bf16", "bf16_params"], "of the text part; default: the preset's"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a preset runs."""

    seeds: int
    counterexample: CounterExample | None = None
    digits: tuple[DigitsGrid, ...] = ()
    text: Text | None = None


_DIGITS_ARMS = (
    "adam",
    "amsgrad",
    "avgrad",
    "yogi",
    "adan",
    "lion",
    "hyper_adam",
    "mada",
    "mada-rho0.6",
    "mada-max",
    "mada-text-rates",
    "mada-normalized",
)
_TEXT_ARMS = (
    "adam",
    "adam-lr3",
    "adam-lr10",
    "adamw",
    "amsgrad",
    "avgrad",
    "yogi",
    "adan",
    "lion",
    "lion-lr0.3",
    "hyper_adam",
    "mada",
    "mada-rho0",
    "mada-beta3",
    "mada-bad-betas",
    "adam-bad-betas",
    "mada-max",
    "mada-digits-rates",
    "mada-normalized",
    "mada-static",
)
_SMALL_GPT = gpt.GPTConfig(vocab_size=256, block_size=64, num_layers=2, num_heads=4, d_model=64)
_REDUCED_TEXT = Text(
    _SMALL_GPT,
    num_steps=400,
    batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.0,
    arms=_TEXT_ARMS,
    eval_every=200,
    checkpoint_every=200,
)
_SMOKE_TEXT = dataclasses.replace(
    _REDUCED_TEXT,
    model=dataclasses.replace(_SMALL_GPT, block_size=32, d_model=32),
    num_steps=20,
    hyper_start_step=0,
    warmup_steps=5,
    eval_every=10,
    checkpoint_every=10,
    log_every=1,
    arms=("adam", "mada"),
)
_PAPER_TEXT = Text(
    gpt.GPTConfig(remat=True),
    num_steps=100_000,
    batch_size=480,
    learning_rate=6e-4,
    final_learning_rate=1.5e-5,
    warmup_steps=2000,
    arms=("adam", "hyper_adam", "adan", "avgrad", "mada", "mada-beta3", "mada-bad-betas"),
    precision="bf16",
    rows_per_device=3,
    loss_chunk=128,
    eval_batches=10,
    eval_batch_size=64,
    eval_every=500,
    checkpoint_every=500,
    openwebtext=True,
)

PRESETS = {
    "smoke": Config(
        seeds=1,
        counterexample=CounterExample(20_000, arms=("adam", "mada"), chunk=2_000),
        digits=(DigitsGrid(60, 1e-3, ("adam", "mada"), beta1=(0.3, 0.9), beta2=(0.75, 0.95)),),
        text=_SMOKE_TEXT,
    ),
    "demo": Config(
        seeds=3,
        counterexample=CounterExample(100_000, arms=("adam", "avgrad", "mada")),
        digits=(DigitsGrid(300, 1e-3, ("adam", "lion", "hyper_adam", "mada")),),
        text=dataclasses.replace(
            _REDUCED_TEXT, num_steps=200, arms=("adam", "lion-lr0.3", "hyper_adam", "mada")
        ),
    ),
    "reduced": Config(
        seeds=3,
        counterexample=CounterExample(1_000_000),
        digits=(
            DigitsGrid(300, 1e-3, _DIGITS_ARMS),
            DigitsGrid(500, 3e-3, _DIGITS_ARMS),
            DigitsGrid(300, 3e-3, ("adam",)),
            DigitsGrid(300, 1e-2, ("adam",)),
        ),
        text=_REDUCED_TEXT,
    ),
    "shakespeare_char": Config(
        seeds=1,
        text=Text(
            gpt.GPTConfig(
                vocab_size=256, block_size=256, num_layers=6, num_heads=6, d_model=384, dropout=0.2
            ),
            num_steps=5000,
            batch_size=64,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup_steps=100,
            b2=0.99,
            hyper_learning_rate=MadaHyperparams(*[2.5e-3] * 6),
            hyper_momentum=0.5,
            arms=("adam", "hyper_adam", "mada"),
            eval_every=250,
            checkpoint_every=250,
        ),
    ),
    # For meshes and several processes: c = gamma = 1 at the start, so no sign amplifies rounding.
    "mesh": Config(seeds=1, text=_SMOKE_TEXT),
    "paper": Config(seeds=1, text=_PAPER_TEXT),
    "paper_355m": Config(
        seeds=1,
        text=dataclasses.replace(
            _PAPER_TEXT,
            model=gpt.GPTConfig(num_layers=24, num_heads=16, d_model=1024, remat=True),
            learning_rate=5e-4,
        ),
    ),
}


def main(context: app.Context[Config]) -> None:
    """Run the parts of the preset and report."""
    config = context.config
    part = config.text
    if part is not None:
        changes = {"num_steps": _NUM_STEPS.value, "precision": _PRECISION.value}
        given: dict[str, Any] = {k: v for k, v in changes.items() if v is not None}
        part = dataclasses.replace(part, **given)
    if context.dry_run:
        if part is None:
            raise ValueError(f"the preset {context.preset} has no text part to compile")
        return dry_run(context, part)

    grids = {f"digits-{g.num_steps}-lr{g.learning_rate:g}": g for g in config.digits}
    results = run_arms(context, _arms(context, config.counterexample, grids, part))
    _report(context, config.counterexample, grids, part, results)


def _arms(context, counterexample, grids, part) -> dict[str, Callable[[Any], dict]]:
    """All arms by name, as functions of their folder."""
    if jax.process_count() > 1 and (counterexample or grids):
        raise ValueError(
            "the parts counterexample and digits run in one process; use a preset "
            "with the text part alone, such as mesh"
        )
    calls: dict[str, tuple] = {}
    for name in counterexample.arms if counterexample else ():
        calls[f"counterexample/{name}"] = run_counterexample, name, counterexample
    for grid, digits_part in grids.items():
        for name in digits_part.arms:
            arm = f"{grid}/{name}"
            calls[arm] = run_digits, arm, name, digits_part
    if part is not None:
        tokens = load_tokens(context, part)
        for name, seed in itertools.product(part.arms, range(context.config.seeds)):
            arm = f"text/{name}/seed-{seed}"
            calls[arm] = run_text, arm, name, seed, part, tokens

    def bind(function, *arguments):
        return lambda folder: function(context, *arguments)

    return {arm: bind(*call) for arm, call in calls.items()}


def _report(context, counterexample, grids, part, results) -> None:
    """Tables, plots, verdicts."""
    verdicts: list[report.Verdict] = []
    files = []

    def of(group):
        prefix = f"{group}/"
        return {n.removeprefix(prefix): r for n, r in results.items() if n.startswith(prefix)}

    def write(group, title, rows, found, panels=None):
        report.table(rows, title=title, path=context.workdir / f"{group}.md")
        files.append(context.workdir / f"{group}.md")
        verdicts.extend(found)
        if panels:
            report.plot(context.workdir / f"{group}.png", panels, title=title)
            files.append(context.workdir / f"{group}.png")

    if found := of("counterexample"):
        rows, bars, panels = counterexample_report(counterexample, found)
        write(
            "counterexample", "Counter-example of Reddi et al. (best x is -1)", rows, bars, panels
        )
    for grid, digits_part in grids.items():
        if found := of(grid):
            seeds = context.config.seeds
            rows, bars = digits_report(digits_part, seeds, found)
            title = (
                f"Digits, lr {digits_part.learning_rate:g}, {digits_part.num_steps} steps, "
                f"{len(digits_part.beta1) * len(digits_part.beta2)} initial betas, seeds: {seeds}"
            )
            write(grid, title, rows, bars, digits_panels(context, grid, found))
    if found := of("text"):
        by_name: dict[str, list[dict]] = {}
        for arm, result in found.items():
            by_name.setdefault(arm.partition("/")[0], []).append(result)
        rows, bars, panels = text_report(context, part, by_name)
        title = f"Text, {part.num_steps} steps, seeds: {max(map(len, by_name.values()))}"
        write("text", title, rows, bars, panels)
    report.conclude(context.workdir, results=results, verdicts=verdicts, files=files)


if __name__ == "__main__":
    app.run("mada", PRESETS, main)
