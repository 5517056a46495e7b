"""An experiment that computes nothing, for the tests of what experiments share."""

import dataclasses
import pathlib

import jax
from absl import flags

from icmljax.experiments.common import app, report
from icmljax.experiments.common.arms import run_arms

POWER = flags.DEFINE_integer("power", 2, "changes the results")


@dataclasses.dataclass(frozen=True)
class Config:
    num_steps: int = 5
    seeds: int = 3


PRESETS = {"smoke": Config(), "paper": Config(num_steps=50)}


def main(context: app.Context[Config]) -> None:
    if context.dry_run:
        report.table([{"devices": jax.device_count(), **context.mesh.shape}], title="Dry run")
        return

    def arm(scale: int):
        def run(folder: pathlib.Path) -> dict:
            seeds = range(context.config.seeds)
            steps = range(context.config.num_steps)
            return {
                "losses": [
                    [scale * (step + seed) ** POWER.value for seed in seeds] for step in steps
                ]
            }

        return run

    results = run_arms(context, {"digits/adam": arm(2), "digits/mada": arm(1), "text/mada": arm(1)})
    report.table(
        [
            {"arm": name, "loss": report.mean_and_standard_error(result["losses"][-1])}
            for name, result in results.items()
        ],
        title="Losses",
        path=context.workdir / "table.md",
    )
    curves = {
        name: report.Curve(range(context.config.num_steps), result["losses"])
        for name, result in results.items()
    }
    report.plot(context.workdir / "loss.png", {"loss": curves})
    report.conclude(
        context.workdir,
        results=results,
        verdicts=[report.Verdict("MADA below Adam", "1 < 2", True)],
        files=[context.workdir / "table.md", context.workdir / "loss.png"],
    )


if __name__ == "__main__":
    app.run("fake", PRESETS, main)
