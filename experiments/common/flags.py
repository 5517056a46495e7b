"""The flags that all experiments share, beside those of `icmljax.experiments.common.command`.

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
DATA_DIR = flags.DEFINE_string("data_dir", None, "folder with the data set, where one is needed")
PROGRESS = flags.DEFINE_bool("progress", True, "show progress bars")
PROFILE = flags.DEFINE_bool("profile", False, "write a jax.profiler trace of a few steps per arm")
