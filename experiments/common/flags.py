"""The flags that all experiments share.

They are defined here once, and a script imports this module by its full name
(`icmljax.experiments.common.flags`; `app` does it for the script): absl refuses a flag that is
defined twice.
"""

from absl import flags

PRESET = flags.DEFINE_string("preset", "smoke", "configuration to run: smoke, reduced, paper, ...")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "folder for everything that is written; default: runs/EXPERIMENT-PRESET"
)
SEEDS = flags.DEFINE_integer("seeds", None, "number of seeds; default: the preset's", lower_bound=1)
ARMS = flags.DEFINE_list("arms", [], "run only these arms; patterns such as 'digits/*' work")
RESUME = flags.DEFINE_bool("resume", False, "continue the run in the workdir; skip finished arms")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "build, lower and compile from shapes, print sizes, run and write nothing"
)
DATA_DIR = flags.DEFINE_string("data_dir", None, "folder with the data set, where one is needed")
PROGRESS = flags.DEFINE_bool("progress", True, "show progress bars")
PROFILE = flags.DEFINE_bool("profile", False, "write a jax.profiler trace of a few steps per arm")
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
