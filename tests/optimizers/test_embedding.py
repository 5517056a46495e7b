"""MADA in other people's code: a flax.nnx training loop, and a light import."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from icmljax.optimizers.mada import hyperparams, mada


def test_in_a_flax_nnx_training_loop():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 1, rngs=rngs))
    tx = optax.chain(optax.clip_by_global_norm(1.0), mada(1e-2, hyper_start_step=5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    assert hyperparams(optimizer.opt_state).rho[...] != 0.6  # it learned


HEAVY = {"matplotlib", "sklearn", "tensorboardX", "flax", "absl", "orbax", "rich", "tqdm"}


@pytest.mark.parametrize("module", ["icmljax.optimizers.mada", "icmljax.optimizers"])
def test_import_is_light(module):
    """Nothing comes along but what optax and chex load themselves (absl's logging)."""
    code = (
        "import sys, chex, optax; before = set(sys.modules); "
        f"import {module}; assert {module!r} in sys.modules; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "icmljax" in loaded
    assert not loaded & HEAVY
