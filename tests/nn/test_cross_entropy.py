"""Tests of icmljax.nn.cross_entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.nn.cross_entropy import (
    cross_entropy,
    cross_entropy_chunked,
    in_chunks,
    token_losses,
    weighted_mean,
)

LOGITS = 5 * jax.random.normal(jax.random.key(0), (2, 3, 7))
TARGETS = jnp.array([[0, 6, 3], [2, 2, 5]])
WEIGHTS = jnp.array([[1.0, 0.0, 0.25], [2.0, 0.0, 0.5]])


def _reference():
    """Log-probabilities and losses in float64."""
    x = np.asarray(LOGITS, np.float64)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return log_p, -np.take_along_axis(log_p, np.asarray(TARGETS)[..., None], -1)[..., 0]


def test_loss_is_the_mean_cross_entropy():
    log_p, losses = _reference()
    np.testing.assert_allclose(token_losses(LOGITS, TARGETS), losses, rtol=1e-5)
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS), losses.mean(), rtol=1e-5)
    gradient = jax.grad(cross_entropy)(LOGITS, TARGETS)
    expected_gradient = (np.exp(log_p) - np.eye(7)[TARGETS]) / 6
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-7)
    # Large logits neither overflow nor turn into NaN, and bfloat16 ones are summed in float32.
    assert cross_entropy(1e30 * LOGITS, TARGETS) < np.inf
    low = cross_entropy(LOGITS.astype(jnp.bfloat16), TARGETS)
    assert low.dtype == jnp.float32
    rounded = cross_entropy(LOGITS.astype(jnp.bfloat16).astype(jnp.float32), TARGETS)
    np.testing.assert_array_equal(low, rounded)


def test_weights():
    log_p, losses = _reference()
    expected = np.sum(WEIGHTS * losses) / WEIGHTS.sum()
    loss, gradient = jax.value_and_grad(cross_entropy)(LOGITS, TARGETS, WEIGHTS)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    shares = WEIGHTS[..., None] / WEIGHTS.sum()
    expected_gradient = shares * (np.exp(log_p) - np.eye(7)[TARGETS])
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-7)
    # Their size does not matter, and a mask picks targets.
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS, 1e-12 * WEIGHTS), expected, rtol=1e-5)
    mask = jnp.asarray(WEIGHTS > 0)
    picked = cross_entropy(LOGITS, TARGETS, mask)
    np.testing.assert_allclose(picked, losses[WEIGHTS > 0].mean(), rtol=1e-5)
    ones = cross_entropy(LOGITS, TARGETS, jnp.ones((2, 3)))
    np.testing.assert_allclose(ones, cross_entropy(LOGITS, TARGETS), rtol=1e-6)
    # Weights of a lower precision do not lower that of the sum.
    assert cross_entropy(LOGITS, TARGETS, mask.astype(jnp.bfloat16)) == picked


def test_without_any_weight_loss_and_gradient_are_zero():
    loss, gradient = jax.value_and_grad(cross_entropy)(LOGITS, TARGETS, jnp.zeros((2, 3)))
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)
    assert weighted_mean(jnp.ones(4), jnp.zeros(4, bool)) == 0


@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize("weighted", [False, True])
def test_chunked_loss_is_the_loss(chunk, weighted):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, table = jax.random.normal(keys[0], (3, 12, 5)), jax.random.normal(keys[1], (9, 5))
    targets = jax.random.randint(keys[2], (3, 12), 0, 9)
    # Chunks differ in what they weigh; one of them weighs nothing.
    weights = jax.random.uniform(keys[3], (3, 12)).at[:, 4:8].set(0) if weighted else None

    def whole(hidden, table):
        return cross_entropy(hidden @ table.T, targets, weights)

    def chunked(hidden, table):
        return cross_entropy_chunked(hidden, table, targets, chunk, weights)

    loss, gradients = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(hidden, table)
    expected, expected_gradients = jax.value_and_grad(whole, argnums=(0, 1))(hidden, table)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6)


def test_chunks_are_put_together_in_order():
    first, second = jnp.arange(2 * 6).reshape(2, 6), jnp.arange(2 * 6 * 3.0).reshape(2, 6, 3)
    seen = []

    def function(first, second):
        seen.append((first.shape, second.shape))
        return {"first": -first, "second": second + 1}

    result = in_chunks(function, (first, second), 2)
    np.testing.assert_array_equal(result["first"], -first)
    np.testing.assert_array_equal(result["second"], second + 1)
    assert set(seen) == {((2, 2), (2, 2, 3))}


def test_chunks_hold_fewer_logits():
    hidden = jax.ShapeDtypeStruct((2, 64, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def temporaries(chunk):
        gradient = jax.jit(jax.grad(cross_entropy_chunked), static_argnums=3)
        compiled = gradient.lower(hidden, table, targets, chunk).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(64) / 4


@pytest.mark.bad_input
@pytest.mark.parametrize("chunk", [5, 0, -4, 32])
def test_bad_chunk(chunk):
    hidden, table, targets = jnp.zeros((1, 16, 4)), jnp.zeros((9, 4)), jnp.zeros((1, 16), jnp.int32)
    with pytest.raises(ValueError, match=f"chunk={chunk} does not divide the sequence of 16"):
        cross_entropy_chunked(hidden, table, targets, chunk)
