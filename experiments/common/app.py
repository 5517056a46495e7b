"""What a script runs in: flags become a `Context`, errors become one line and exit status 1.

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

import absl.app
import jax
from absl import flags as absl_flags
from absl import logging

from icmljax.experiments.common import flags
from icmljax.training import mesh as mesh_lib
from icmljax.training import workdir as workdir_lib
from icmljax.training.loop import Preempted

Config = TypeVar("Config")

_EXPECTED = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    FloatingPointError,
    ImportError,
    absl_flags.Error,
)


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
    ``--resume`` insists on the same values. `--pdb` stops in the debugger at an error, and
    `--verbosity=0` shows where it came from.

    Args:
      experiment: its name.
      presets: frozen dataclasses by name; where there is a field ``seeds``, ``--seeds`` sets it.
      main: the experiment. Errors that a user can cause (all but programming errors such as
        AssertionError and KeyError) end the process with one line on stderr and exit status 1.
    """

    def guarded(argv: list[str]) -> None:
        context = None
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}: flags start with --")
            context = _context(experiment, presets)
            main(context)
        except Preempted as preempted:
            _say(str(preempted))
        except _EXPECTED as error:
            if context is not None and not context.dry_run:
                workdir_lib.discard_unused(context.workdir)
            if absl_flags.FLAGS.pdb_post_mortem or absl_flags.FLAGS.run_with_pdb:
                raise
            logging.info("where it came from:", exc_info=True)
            _say(f"error: {_message(error)}")
            sys.exit(1)

    for flag in absl_flags.FLAGS.get_flags_for_module(flags.__name__):
        absl_flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # for --help
    absl.app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = absl_flags.FLAGS(argv)
    except absl_flags.Error as error:
        _say(f"error: {_message(error)}; --help lists the flags")
        sys.exit(1)
    if absl_flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)  # absl's own default is INFO: much noise
    return rest


def _context(experiment: str, presets: Mapping[str, Config]) -> Context[Config]:
    """Checks the flags in the order of what they cost, starts the back end, makes the workdir."""
    _require_extras()
    preset = flags.PRESET.value
    config = _config(preset, presets)
    data_dir = pathlib.Path(flags.DATA_DIR.value).absolute() if flags.DATA_DIR.value else None
    if data_dir and not data_dir.is_dir():
        raise FileNotFoundError(f"no data folder {data_dir}; give an existing one as --data_dir")

    _start_back_end()
    mesh = mesh_lib.make_mesh(flags.MESH.value)

    workdir = pathlib.Path(flags.WORKDIR.value or f"runs/{experiment}-{preset}").absolute()
    if not flags.DRY_RUN.value:
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
        dry_run=flags.DRY_RUN.value,
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


def _start_back_end() -> None:
    if flags.NUM_VIRTUAL_DEVICES.value is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.NUM_VIRTUAL_DEVICES.value)
    if flags.DEBUG_NANS.value:
        jax.config.update("jax_debug_nans", True)
    address = flags.COORDINATOR_ADDRESS.value
    num_processes, process_id = flags.NUM_PROCESSES.value, flags.PROCESS_ID.value
    if address is None and num_processes is None and process_id is None:
        return
    if address is None or num_processes is None or process_id is None:
        raise ValueError(
            "a run of several processes needs --coordinator_address, --num_processes and "
            f"--process_id; got {address}, {num_processes}, {process_id}"
        )
    mesh_lib.initialize_distributed(address, num_processes, process_id)


def _require_extras() -> None:
    # At the start: a run of hours must not end at the missing plot library.
    for module in ("matplotlib", "rich", "sklearn", "tensorboardX", "tqdm"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"{module} is not installed")


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError) and "pip install" not in text:
        text += "; pip install 'icmljax[experiments]'"
    return text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
