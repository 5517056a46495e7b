"""A script as a command: the flags of devices, and errors as one line with exit status 1.

The flags are defined here once, and a script imports this module by its full name
(`icmljax.experiments.common.command`): absl refuses a flag that is defined twice.
"""

import os
import sys
from collections.abc import Callable

import absl.app
import jax
from absl import flags, logging

from icmljax.training import mesh as mesh_lib

DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "build, lower and compile from shapes, print sizes, run and write nothing"
)
DEBUG_NANS = flags.DEFINE_bool("debug_nans", False, "stop at the operation that makes a NaN; slow")

MESH = flags.DEFINE_string("mesh", None, "such as data=4,model=2; default: all devices on data")
NUM_VIRTUAL_DEVICES = flags.DEFINE_integer(
    "num_virtual_devices", None, "run on this many virtual CPU devices", lower_bound=1
)
COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0, for a run of several processes"
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "how many processes take part", lower_bound=1
)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this one is", lower_bound=0)

_EXPECTED = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    FloatingPointError,
    ImportError,
    flags.Error,
)


def run(main: Callable[[], None], *, extra: str = "experiments") -> None:
    """Runs a script; never returns.

    `--pdb` stops in the debugger at an error, and `--verbosity=0` shows where it came from.

    Args:
      main: the script. Errors that a user can cause (all but programming errors such as
        AssertionError and KeyError) end the process with one line on stderr and exit status 1.
      extra: what to install where an import fails.
    """

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}: flags start with --")
            main()
        except _EXPECTED as error:
            if flags.FLAGS.pdb_post_mortem or flags.FLAGS.run_with_pdb:
                raise
            logging.info("where it came from:", exc_info=True)
            say(f"error: {_message(error, extra)}")
            sys.exit(1)

    show_in_help(__name__)
    absl.app.run(guarded, flags_parser=_parse)


def show_in_help(module: str) -> None:
    """Has `--help` list the flags of a module beside the script's own."""
    for flag in flags.FLAGS.get_flags_for_module(module):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def start_back_end() -> jax.sharding.Mesh:
    """Starts jax as the flags say, and returns the mesh."""
    if NUM_VIRTUAL_DEVICES.value is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", NUM_VIRTUAL_DEVICES.value)
        # XLA's threads: with no more of them than devices, a collective can wait for ever.
        os.environ.setdefault("NPROC", str(2 * NUM_VIRTUAL_DEVICES.value))
    if DEBUG_NANS.value:
        jax.config.update("jax_debug_nans", True)
    address, num_processes = COORDINATOR_ADDRESS.value, NUM_PROCESSES.value
    process_id = PROCESS_ID.value
    if (address, num_processes, process_id) != (None, None, None):
        if address is None or num_processes is None or process_id is None:
            raise ValueError(
                "a run of several processes needs --coordinator_address, --num_processes and "
                f"--process_id; got {address}, {num_processes}, {process_id}"
            )
        mesh_lib.initialize_distributed(address, num_processes, process_id)
    return mesh_lib.make_mesh(MESH.value)


def say(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        say(f"error: {_message(error, '')}; --help lists the flags")
        sys.exit(1)
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)  # absl's own default is INFO: much noise
    return rest


def _message(error: Exception, extra: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError) and "pip install" not in text:
        text += f"; pip install 'icmljax[{extra}]'"
    return text
