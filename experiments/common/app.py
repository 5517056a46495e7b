"""What an experiment runs in: flags become a `Context`.

A script ends with

    if __name__ == "__main__":
        app.run("mada", PRESETS, main)
"""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
from absl import flags as absl_flags

from icmljax.experiments.common import command, flags
from icmljax.training import workdir as workdir_lib
from icmljax.training.loop import Preempted

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Context(Generic[Config]):
    """One run of an experiment, as its ``main`` sees it."""

    experiment: str
    preset: str
    config: Config  # the preset, with --seeds put in
    workdir: pathlib.Path  # in a dry run it does not exist
    mesh: jax.sharding.Mesh
    arms: tuple[str, ...]  # patterns; empty: all
    resume: bool
    dry_run: bool
    data_dir: pathlib.Path | None  # exists when given
    progress: bool
    profile: bool

    def arm(self, name: str) -> pathlib.Path:
        """The folder of an arm."""
        return self.workdir / "arms" / name

    def loop_options(self, name: str) -> dict[str, Any]:
        """The arguments of `icmljax.training.loop.run` that follow from the flags and the arm."""
        return {
            "directory": self.arm(name),
            "identity": {"experiment": self.experiment, "arm": name},
            "mesh": self.mesh,
            "resume": self.resume,
            "progress": self.progress,
            "description": name,
            "profile_dir": self.arm(name) / "profile" if self.profile else None,
        }


def run(
    experiment: str,
    presets: Mapping[str, Config],
    main: Callable[[Context[Config]], None],
) -> None:
    """Runs a script; never returns.

    The flags that the script itself defines are taken to change results: they are recorded, and
    ``--resume`` insists on the same values.

    Args:
      experiment: its name.
      presets: frozen dataclasses by name; where there is a field ``seeds``, ``--seeds`` sets it.
      main: the experiment; see `command.run` for its errors.
    """

    def script() -> None:
        context = None
        try:
            context = _context(experiment, presets)
            main(context)
        except Preempted as preempted:
            command.say(str(preempted))
        except Exception:
            if context is not None and not context.dry_run:
                workdir_lib.discard_unused(context.workdir)
            raise

    command.show_in_help(flags.__name__)
    command.run(script)


def _context(experiment: str, presets: Mapping[str, Config]) -> Context[Config]:
    """Checks the flags in the order of what they cost, starts the back end, makes the workdir."""
    _require_extras()
    preset = flags.PRESET.value
    config = _config(preset, presets)
    data_dir = pathlib.Path(flags.DATA_DIR.value).absolute() if flags.DATA_DIR.value else None
    if data_dir and not data_dir.is_dir():
        raise FileNotFoundError(f"no data folder {data_dir}; give an existing one as --data_dir")

    mesh = command.start_back_end()

    workdir = pathlib.Path(flags.WORKDIR.value or f"runs/{experiment}-{preset}").absolute()
    if not command.DRY_RUN.value:
        recorded = {
            "preset": preset,
            "seeds": flags.SEEDS.value,
            "data_dir": data_dir and str(data_dir),
        }
        # absl knows the flags of the main module under the path that it was started with.
        own = absl_flags.FLAGS.get_flags_for_module(sys.argv[0])
        recorded |= {flag.name: flag.value for flag in own}
        workdir_lib.prepare(
            workdir, experiment=experiment, flags=recorded, resume=flags.RESUME.value
        )
    return Context(
        experiment=experiment,
        preset=preset,
        config=config,
        workdir=workdir,
        mesh=mesh,
        arms=tuple(flags.ARMS.value),
        resume=flags.RESUME.value,
        dry_run=command.DRY_RUN.value,
        data_dir=data_dir,
        progress=flags.PROGRESS.value,
        profile=flags.PROFILE.value,
    )


def _config(preset: str, presets: Mapping[str, Config]) -> Config:
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; there are: {', '.join(presets)}")
    config: Any = presets[preset]
    if flags.SEEDS.value is None:
        return config
    if "seeds" not in {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"the preset {preset!r} has no seeds to set; leave --seeds out")
    return dataclasses.replace(config, seeds=flags.SEEDS.value)


def _require_extras() -> None:
    # At the start: a run of hours must not end at the missing plot library.
    for module in ("matplotlib", "rich", "sklearn", "tensorboardX", "tqdm"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"{module} is not installed")
