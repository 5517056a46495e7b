"""A tiny model, and the real one where its file is installed."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.language import llama, weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2"

TINY = llama.LlamaConfig(
    vocab_size=61,
    d_model=32,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    max_length=64,
)


def draw_params(config, key=0):
    """Weights large enough for attention and logits to be far from uniform."""
    params = llama.init(jax.random.key(key), config)
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 2 else leaf, params)
    return {**params, "head": params["head"] * 20} if "head" in params else params


@pytest.fixture(scope="session")
def tiny():
    """Configuration, parameters."""
    return TINY, draw_params(TINY)


@pytest.fixture(scope="session")
def prompts():
    """Five prompts of different lengths: tokens padded on the right, lengths."""
    lengths = np.array([12, 5, 9, 1, 7])
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (5, 12))
    # Padding is filled with something: it must not matter.
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


@pytest.fixture(scope="session")
def smollm2():
    """Configuration and float32 parameters of SmolLM2-135M-Instruct."""
    return weights.load_gguf(smollm2_file())


def smollm2_file():
    try:
        return weights.smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def load_golden(name):
    return np.load(GOLDEN / f"{name}.npz")
