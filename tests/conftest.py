"""Test configuration: eight virtual CPU devices, a compilation cache, repeatable hypothesis."""

import os
import pathlib

import hypothesis
import jax

import tests.typecheck  # noqa: F401 - jaxtyping's hook imports only the package tests

# In the environment for the subprocesses that tests start, in jax.config for this process: jax has
# read its environment already.
_CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# XLA's pool of max(NPROC, devices) threads: with as many threads as devices, a collective can wait
# for ever for a device whose thread never comes.
os.environ.setdefault("NPROC", "16")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_num_cpu_devices", 8)

# Compilation makes the first example slow; the same examples every time.
hypothesis.settings.register_profile("icmljax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("icmljax")
