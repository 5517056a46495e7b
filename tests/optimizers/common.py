"""What the tests of the optimizers share: reference numbers, gradients, replay of a trace."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from icmljax.optimizers.mada import MadaHyperparams, hyperparams

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "mada"
INTERIOR = MadaHyperparams(0.8, 0.9, 0.3, 0.4, 0.7, 0.6)
ADAM = MadaHyperparams(0.9, 0.99, 0.0, 1.0, 1.0, 1.0)


def golden(name, dtype=np.float64):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key].astype(dtype) for key in file.files}


def is_mada(x):
    return hasattr(x, "hyper_gradient")


def mada_state(opt_state):
    """The only MADA state inside an optimizer state."""
    (state,) = filter(is_mada, jax.tree.leaves(opt_state, is_leaf=is_mada))
    return state


def replay(optimizer, grads, *, params=None, state=None, **extra):
    """Feed an optimizer with given gradients (leading axis: the step), open loop.

    Returns:
        The last state, and per step the updates and the whole state.
    """
    if params is None:
        params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
    if state is None:
        state = optimizer.init(params)

    def step(state, g):
        updates, state = optimizer.update(g, state, params, **extra)
        return state, (updates, state)

    state, (updates, states) = jax.lax.scan(step, state, grads)
    return state, updates, states


def directions(optimizer, grads, **kwargs):
    """The updates of a replay, compiled."""
    return jax.jit(lambda g: replay(optimizer, g, **kwargs)[1])(grads)


def stacked(coefficients):
    """Six arrays as one, with the coefficients last."""
    return np.stack([np.asarray(x) for x in coefficients], axis=-1)


def random_tree(seed, steps=None, scale=1.0, dtype=np.float32, shapes=None):
    """Gradients of an awkward tree: a matrix, a vector, a scalar, an empty leaf."""
    shapes = shapes or {"w": (5, 3), "b": (4,), "s": (), "none": (0, 2)}
    rng = np.random.default_rng(seed)
    lead = () if steps is None else (steps,)
    return {k: (scale * rng.normal(size=lead + s)).astype(dtype) for k, s in shapes.items()}


def quadratic(seed=0, dtype=np.float32, shapes=None):
    """A curved loss with minibatch noise, its first parameters, and its noise for 30 steps."""
    params = random_tree(seed, dtype=dtype, shapes=shapes)
    noise = random_tree(seed + 1, 30, 0.3, dtype=dtype, shapes=shapes)

    def loss(params, noise):
        shifted = jax.tree.map(lambda p, e: p - 0.3 + e, params, noise)
        terms = jax.tree.map(lambda x: jnp.sum(jnp.sqrt(1 + x**2) + 0.1 * x**2), shifted)
        return sum(jax.tree.leaves(terms))

    return loss, params, noise


def train(optimizer, loss, params, noise, state=None):
    """Closed loop in one scan; returns (params, state), and the coefficients at each step."""
    if state is None:
        state = optimizer.init(params)

    def step(carry, e):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, e), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), hyperparams(state)

    return jax.lax.scan(step, (params, state), noise)


def assert_equal(a, b):
    """Two trees are equal bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol=0.0, atol=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)
