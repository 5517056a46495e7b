"""Exact Orthogonal Initialization: does a very deep sparse network train, and what does it cost?

Part ``spectrum`` is the Jacobian at the start, over densities. Part ``timing`` initialises square
matrices, beside dense QR. The other parts train networks with fixed masks: very deep tanh networks,
a depthwise-separable one, and (preset ``paper``, or its rows by name) the networks of the paper on
MNIST, CIFAR-10 and Tiny-ImageNet (``--data_dir``, with subfolders mnist, cifar10, tiny-imagenet
where there are several).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags

from icmljax.experiments.common import app, report
from icmljax.experiments.common.arms import run_arms
from icmljax.experiments.eoi.spectrum import Spectrum, run_spectrum, spectrum_report
from icmljax.experiments.eoi.timing import Timing, run_timing, timing_report
from icmljax.experiments.eoi.training import (
    Training,
    accuracies,
    curves,
    dry_run,
    load_data,
    run_training,
    training_report,
)

_DIGITS = flags.DEFINE_bool(
    "digits", False, "train on scikit-learn's 8 x 8 digits instead of the 5000 of MNIST"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a preset runs."""

    seeds: int
    training: Mapping[str, Training] = dataclasses.field(default_factory=dict)
    spectrum: Spectrum | None = None
    timing: Timing | None = None


_TANH: dict[str, Any] = dict(activation="tanh", sigma_w=1.0247, sigma_b=0.00448)
_DEEP: dict[str, Any] = dict(
    network="mlp", data="mnist5000", width=64, ai_steps=1000, together=True, spectrum=True, **_TANH
)
_DEEP_300 = Training(
    **_DEEP,
    depth=300,
    num_steps=400,
    learning_rate=3e-3,
    arms=("dense", "eoi", "eoi-matching", "ai", "sao", "masked"),
)
_DEEP_1000 = Training(
    **_DEEP,
    depth=1000,
    num_steps=300,
    learning_rate=2e-3,
    arms=("dense", "eoi", "sao", "masked"),
)
# Dense orthogonal weights need a smaller learning rate at this depth.
_DEEP_1000_SLOW = dataclasses.replace(_DEEP_1000, learning_rate=1e-3, arms=("dense", "eoi"))
_SEPARABLE = Training(
    network="separable",
    data="mnist5000",
    density=0.15,
    num_steps=300,
    learning_rate=0.05,
    weight_decay=1e-3,
    arms=("default", "eoi-official", "eoi", "eoi-tap"),
    together=True,
)

# The rows of the paper's table.
_EVERYTHING = tuple(
    f"{method}-{init}"
    for method in ("uniform", "erk", "snip", "grasp", "synflow")
    for init in ("default", "ai", "eoi")
)
_DEEP_ARMS = ("dense", "eoi", "ai", "masked", "default")
_CIFAR: dict[str, Any] = dict(
    data="cifar10",
    arms=_EVERYTHING,
    learning_rate=0.1,
    epochs=200,
    augment=True,
    eval_every=1000,
    checkpoint_every=1000,
)
_PAPER: dict[str, Training] = {
    "mnist_mlp1000": Training(
        network="mlp",
        data="mnist",
        depth=1000,
        width=128,
        learning_rate=1e-4,
        epochs=100,
        ai_steps=1000,
        arms=(*_DEEP_ARMS, "sao"),
        eval_every=1000,
        checkpoint_every=1000,
        **_TANH,
    ),
    "cifar10_cnn1000": Training(
        network="cnn",
        data="cifar10",
        depth=1000,
        width=128,
        learning_rate=1e-4,
        epochs=100,
        ai_steps=1000,
        arms=_DEEP_ARMS,
        eval_every=1000,
        checkpoint_every=1000,
        **_TANH,
    ),
    **{
        f"cifar10_resnet{depth}": Training(network="resnet", depth=depth, density=0.1, **_CIFAR)
        for depth in (32, 56, 110)
    },
    "cifar10_vgg16": Training(network="vgg16", density=0.1, **_CIFAR),
    "tinyimagenet_efficientnet_b0": Training(
        network="efficientnet_b0",
        data="tiny-imagenet",
        density=0.1,
        learning_rate=0.01,
        weight_decay=1e-3,
        epochs=120,
        augment=True,
        arms=(*_EVERYTHING, "eoi-official"),
        eval_every=1000,
        checkpoint_every=1000,
    ),
}
_PAPER_05 = {
    f"{name}_d05": dataclasses.replace(part, density=0.05)
    for name, part in _PAPER.items()
    if name.startswith(("cifar10_resnet", "cifar10_vgg"))
}
_ACTIVATIONS = {
    f"cifar10_resnet32_{activation}": dataclasses.replace(
        _PAPER["cifar10_resnet32"], activation=activation
    )
    for activation in ("tanh", "lrelu", "selu")
}

PRESETS = {
    "smoke": Config(
        seeds=1,
        training={
            "deep-100": dataclasses.replace(
                _DEEP_300, depth=100, num_steps=150, arms=("eoi", "masked")
            )
        },
        spectrum=Spectrum(densities=(0.1,), activations=("linear",), inits=("eoi", "masked")),
        timing=Timing(sizes=(128,), rounds=2),
    ),
    "reduced": Config(
        seeds=3,
        training={
            "deep-300": _DEEP_300,
            "deep-1000": _DEEP_1000,
            "deep-1000-lr1e-3": _DEEP_1000_SLOW,
            "separable": _SEPARABLE,
        },
        spectrum=Spectrum(ai_steps=2000),
        timing=Timing(),
    ),
    "spectrum": Config(seeds=5, spectrum=Spectrum()),
    "timing": Config(seeds=1, timing=Timing()),
    "paper": Config(
        seeds=5, training=_PAPER | _PAPER_05 | _ACTIVATIONS, spectrum=Spectrum(), timing=Timing()
    ),
    **{name: Config(seeds=5, training={name: part}) for name, part in _PAPER.items()},
}


def main(context: app.Context[Config]) -> None:
    """Run the parts of the preset and report."""
    training = {
        group: dataclasses.replace(part, data=_data_of(part.data))
        for group, part in context.config.training.items()
    }
    config = dataclasses.replace(context.config, training=training)
    context = dataclasses.replace(context, config=config)
    if context.dry_run:
        return dry_run(context, config.training)
    if jax.process_count() > 1 and (config.timing or config.spectrum or _populations(config)):
        raise ValueError(
            "the parts spectrum and timing, and those that train all seeds at once, run in one"
            " process; use a preset of one of the paper's networks"
        )
    results = run_arms(context, _arms(context))
    _report(context, results)


def _populations(config: Config) -> bool:
    return any(part.together for part in config.training.values())


def _data_of(name: str) -> str:
    return "digits" if _DIGITS.value and name == "mnist5000" else name


def _arms(context: app.Context[Config]) -> dict[str, Callable[[Any], dict]]:
    """All arms by name, as functions of their folder."""
    config, calls = context.config, dict[str, tuple]()
    data = {part.data: load_data(context, part.data) for part in config.training.values()}
    for group, part in config.training.items():
        for arm in part.arms:
            if part.together:
                name, seeds = f"{group}/{arm}", tuple(range(config.seeds))
                calls[name] = run_training, context, name, arm, seeds, part, data[part.data]
                continue
            for seed in range(config.seeds):
                name = f"{group}/{arm}/seed-{seed}"
                calls[name] = run_training, context, name, arm, (seed,), part, data[part.data]
    if config.spectrum:
        name = _data_of("mnist5000")
        source = data.get(name) or load_data(context, name)
        for init in config.spectrum.inits:
            calls[f"spectrum/{init}"] = run_spectrum, context, init, config.spectrum, source
    if config.timing:
        calls["timing"] = run_timing, config.timing

    def bind(function, *arguments):
        return lambda folder: function(*arguments)

    return {name: bind(*call) for name, call in calls.items()}


def _report(context: app.Context[Config], results: Mapping[str, dict]) -> None:
    """Tables, plots, verdicts."""
    config = context.config
    verdicts: list[report.Verdict] = []
    files: list[Any] = []

    def write(group, title, rows, found, panels, **plotting):
        report.table(rows, title=title, path=context.workdir / f"{group}.md")
        report.plot(context.workdir / f"{group}.png", panels, title=title, **plotting)
        files.extend(context.workdir / f"{group}.{kind}" for kind in ("md", "png"))
        verdicts.extend(found)

    for group, part in config.training.items():
        runs: dict[str, list[dict]] = {}
        folders: dict[str, list[str]] = {}
        for name, result in results.items():
            if name.startswith(f"{group}/"):
                arm = name.split("/")[1]
                runs.setdefault(arm, []).append(result)
                folders.setdefault(arm, []).append(name)
        if runs:
            title = f"{group}: {part.network} on {part.data}, density {part.density:g}"
            rows, found = training_report(part, runs), _verdicts(group, runs)
            write(group, title, rows, found, curves(context, folders))
    spectra = {n.removeprefix("spectrum/"): r for n, r in results.items() if "spectrum/" in n}
    if config.spectrum and spectra:
        rows, found, panels = spectrum_report(config.spectrum, spectra)
        write(
            "spectrum", "Mean singular value of the Jacobian", rows, found, panels, xlabel="density"
        )
    if config.timing and "timing" in results:
        rows, found, panels = timing_report(config.timing, results["timing"])
        write("timing", "Time of an initialization", rows, found, panels, xlabel="size", log_y=True)
    report.conclude(context.workdir, results=results, verdicts=verdicts, files=files)


def _verdicts(group: str, runs: Mapping[str, list[dict]]) -> list[report.Verdict]:
    """The bars of the deep networks and of the separable one."""
    accuracy = {arm: accuracies(found) for arm, found in runs.items()}
    singular = {
        arm: float(np.mean([run["singular_values"] for run in found]))
        for arm, found in runs.items()
        if "singular_values" in found[0]
    }
    verdicts = []

    def add(needed, bar, measured, passed):
        if set(needed) <= accuracy.keys():
            verdicts.append(report.Verdict(f"{group}: {bar}", measured(), bool(passed())))

    def shown(arm):
        return f"{arm} " + ", ".join(f"{x:.3f}" for x in accuracy[arm])

    def above(arm, limit):
        return lambda: np.all(accuracy[arm] >= limit)

    def below(arm, limit):
        return lambda: np.all(accuracy[arm] <= limit)

    if group == "deep-100":
        gain = lambda: (accuracy["eoi"] - accuracy["masked"]).mean()  # noqa: E731
        add(
            ("eoi", "masked"),
            "EOI - masked >= 0.30",
            lambda: f"{gain():.3f}",
            lambda: gain() >= 0.3,
        )
    if group in ("deep-300", "deep-1000"):
        limit = 0.8 if group == "deep-300" else 0.7
        bar = f"EOI >= {limit} with each seed"
        add(["eoi"], bar, lambda: shown("eoi"), above("eoi", limit))
        bar = "masked <= 0.20 with each seed"
        add(["masked"], bar, lambda: shown("masked"), below("masked", 0.2))
    if group == "deep-300":
        add(
            ("eoi", "ai"),
            "EOI - AI >= 0.08 on the mean, > 0 with each seed",
            lambda: f"{shown('eoi')}; {shown('ai')}",
            lambda: (
                (accuracy["eoi"] - accuracy["ai"]).mean() >= 0.08
                and np.all(accuracy["eoi"] > accuracy["ai"])
            ),
        )
        add(
            ("eoi", "masked"),
            "mean singular value of masked < 1e-6, of EOI in [0.1, 1]",
            lambda: f"{singular['masked']:.1e}, {singular['eoi']:.2f}",
            lambda: singular["masked"] < 1e-6 and 0.1 <= singular["eoi"] <= 1,
        )
    if group == "separable":
        add(
            ("eoi", "eoi-official"),
            "EOI with a block for each group beats the authors' rule, with each seed",
            lambda: f"{shown('eoi')}; {shown('eoi-official')}",
            lambda: np.all(accuracy["eoi"] > accuracy["eoi-official"]),
        )
    return verdicts


if __name__ == "__main__":
    app.run("eoi", PRESETS, main)
