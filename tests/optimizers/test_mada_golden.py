"""MADA against numbers of other implementations: traces, and the optimizers at its corners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from icmljax.kernels.mada_step import Moments
from icmljax.optimizers.mada import NAMES, MadaHyperparams, avgrad, mada, scale_by_mada
from tests.optimizers.common import (
    ADAM,
    INTERIOR,
    assert_close,
    assert_equal,
    directions,
    golden,
    mada_state,
    replay,
    stacked,
)

OFFICIAL = ("gpt_preset", "interior", "momentum", "box_hits", "dead_inputs")
EXACT = ("adam_start", "interior")


# ------------------------------------------------------------------------------- traces


def _replay_trace(case, compat):
    """Replay with one more gradient: the buffers it starts from are those after the last step."""
    optimizer = mada(
        lambda count: case["lr"][count],
        MadaHyperparams(*case["hyper0"]),
        hyper_learning_rate=MadaHyperparams(*case["hyper_lr"]),
        hyper_momentum=MadaHyperparams(*case["hyper_momentum"]),
        hyper_grad_clip=case["hyper_clip"],
        hyper_start_step=0,
        eps=case["eps"],
        compat=compat,
    )
    grads = jnp.concatenate([case["grads"], jnp.zeros_like(case["grads"][:1])])
    last, updates, states = replay(optimizer, grads)
    last, states = mada_state(last), mada_state(states)
    return updates[:-1], states.hyper, states.hyper_gradient, last.moments


_replay_trace = jax.jit(_replay_trace, static_argnums=1)


def _run_trace(name, compat, dtype):
    data = golden(name, dtype)
    clip = data["hyper_clip"] if data.get("hyper_clip", 0) else dtype(np.inf)
    names = ("grads", "lr", "eps", "hyper0", "hyper_lr", "hyper_momentum")
    case = {**{key: data[key] for key in names}, "hyper_clip": clip}
    updates, hyper, hypergrad, after = _replay_trace(case, compat)
    return data, np.asarray(updates), stacked(hyper)[:-1], stacked(hypergrad)[:-1], after


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_trace(name):
    with jax.enable_x64(True):
        data, updates, hyper, hypergrad, after = _run_trace(
            f"official_{name}", "official", np.float64
        )
    params = data["params"][0] + np.cumsum(updates, axis=0)
    np.testing.assert_allclose(params, data["params"][1:], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(hyper, data["hyper"], rtol=1e-10)
    # The floor is the rounding of a sum of D terms of order 1 that cancel.
    np.testing.assert_allclose(hypergrad, data["hypergrad"], rtol=1e-7, atol=1e-14)
    finals = ("final_m", "final_v", "final_v_mean", "final_n", "final_m_lion")
    for buffer, final in zip(after, finals, strict=False):
        np.testing.assert_allclose(buffer, data[final], rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("name", EXACT)
def test_exact_trace(name):
    with jax.enable_x64(True):
        data, updates, hyper, hypergrad, after = _run_trace(f"exact_{name}", None, np.float64)
    np.testing.assert_allclose(updates, data["updates"], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(hyper, data["hyper"], rtol=1e-10)
    np.testing.assert_allclose(hypergrad, data["hypergrad"], rtol=1e-8, atol=1e-15)
    finals = ("final_m", "final_v", "final_vm", "final_n", "final_ml", "final_g")
    for buffer, final in zip(after, finals, strict=True):
        np.testing.assert_allclose(buffer, data[final], rtol=1e-10, atol=1e-16)
    assert (hypergrad[0] == 0).all() and (hypergrad[1:] != 0).any(axis=0).all()
    assert (np.asarray(updates)[:, 3] == 0).all()  # a dead coordinate moves nowhere


@pytest.mark.parametrize(
    ("name", "compat"),
    [*((f"official_{n}", "official") for n in OFFICIAL), *((f"exact_{n}", None) for n in EXACT)],
)
def test_trace_in_float32(name, compat):
    data, updates, hyper, _, _ = _run_trace(name, compat, np.float32)
    assert updates.dtype == np.float32
    expected = np.diff(data["params"], axis=0) if compat else data["updates"]
    moved = np.cumsum(updates, axis=0) - np.cumsum(expected, axis=0)
    assert np.abs(moved).max() < 2e-5
    # Each hyper step multiplies rounding by the hyper learning rate over 1 - beta2.
    np.testing.assert_allclose(hyper, data["hyper"], atol=1e-3)


# ------------------------------------------------------------------------------- corners

ADAN = MadaHyperparams(0.9, 0.99, 0.5, 1.0, 1.0, 1.0)
AMSGRAD = ADAM._replace(rho=0.0)

# name in corners.npz, coefficients, options
CORNERS = [
    ("optax_adam", ADAM, dict(eps=1e-8)),
    ("optax_yogi_acc0", ADAM._replace(c=0.0), dict(eps=1e-3)),
    ("optax_yogi", ADAM._replace(c=0.0), dict(eps=1e-3, initial_accumulator=1e-6)),
    ("optax_lion", INTERIOR._replace(gamma=0.0), dict()),
    ("optax_lion_0931", INTERIOR._replace(gamma=0.0), dict(compat="official")),
    ("optax_adan_b2_half", ADAN, dict(eps=1e-8, diff_bias_correction=True)),
    ("torch_amsgrad", AMSGRAD, dict(eps=1e-8, second_moment="max")),
    ("optax_amsgrad", AMSGRAD, dict(eps=1e-8, second_moment="max", max_after_correction=True)),
]


@pytest.mark.parametrize(("name", "init", "options"), CORNERS, ids=[c[0] for c in CORNERS])
def test_corner(name, init, options):
    data = golden("corners")
    with jax.enable_x64(True):
        optimizer = scale_by_mada(init=init, frozen=NAMES, **options)
        found = directions(optimizer, jnp.asarray(data["grads"]))
    # One unit in the last place of float64 is 1e-16 relative; Adan and Adam divide by 1e-8.
    np.testing.assert_allclose(found, data[name], rtol=1e-14, atol=1e-14)


def test_corners_are_different():
    """The equalities above mean something: each option that they need makes a difference."""
    data = golden("corners")
    for name, init, options in CORNERS:
        for option in set(options) - {"eps"}:
            less = {k: v for k, v in options.items() if k != option}
            if option == "second_moment":
                continue  # max_after_correction needs it
            with jax.enable_x64(True):
                found = directions(scale_by_mada(init=init, frozen=NAMES, **less), data["grads"])
            assert np.abs(np.asarray(found) - data[name]).max() > 1e-7, (name, option)


def _loop(optimizer, grads):
    """Replay operation by operation: nothing is fused, so no multiply-add is contracted."""
    with jax.disable_jit():
        state, updates = optimizer.init(jnp.zeros_like(grads[0])), []
        for g in jnp.asarray(grads):
            update, state = optimizer.update(g, state)
            updates.append(update)
    return jnp.stack(updates)


def _gradients(dtype, steps=30, size=500):
    return np.random.default_rng(0).normal(size=(steps, size)).astype(dtype)


DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
def test_frozen_adam_is_optax_adam_bit_for_bit(dtype):
    with jax.enable_x64(dtype == np.float64):
        grads = _gradients(dtype)
        schedule = optax.linear_schedule(1e-2, 1e-3, 20)
        found = directions(mada(schedule, ADAM, frozen=NAMES, eps=1e-8), grads)
        assert found.dtype == dtype
        assert_equal(found, directions(optax.adam(schedule, 0.9, 0.99, eps=1e-8), grads))


@DTYPES
@pytest.mark.parametrize("frozen", [NAMES, ()], ids=["frozen", "learned"])
def test_lion_is_optax_lion_bit_for_bit(dtype, frozen):
    with jax.enable_x64(dtype == np.float64):
        grads = _gradients(dtype)
        init = INTERIOR._replace(gamma=0.0)
        found = directions(scale_by_mada(0.1, init, hyper_learning_rate=0.0, frozen=frozen), grads)
        assert_equal(found, directions(optax.scale_by_lion(0.95, 0.98), grads))


@DTYPES
def test_learned_adam_is_optax_adam_with_betas_of_its_dtype(dtype):
    """Given Python numbers optax computes 1 - b2 in float64, where the coefficients are arrays."""
    with jax.enable_x64(dtype == np.float64):
        grads = _gradients(dtype)
        found = directions(scale_by_mada(init=ADAM, hyper_learning_rate=0.0, eps=1e-8), grads)
        adam = optax.scale_by_adam(jnp.asarray(0.9, dtype), jnp.asarray(0.99, dtype), eps=1e-8)
        # A handful of roundings; m is a sum that may cancel, so the error is absolute.
        assert_close(found, directions(adam, grads), atol=8 * np.finfo(dtype).eps)


@DTYPES
def test_avgrad_is_the_rho_zero_corner(dtype):
    """AVGrad in plain NumPy."""
    with jax.enable_x64(dtype == np.float64):
        grads = _gradients(dtype)
        found = np.asarray(directions(avgrad(0.1, 0.9, 0.99, eps=1e-8), grads))
        m = v = vbar = np.zeros(grads.shape[1])
        for t, g in enumerate(grads.astype(np.float64), start=1):
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            vbar = ((t - 1) * vbar + v) / t
            expected = -0.1 * (m / (1 - 0.9**t)) / (np.sqrt(vbar / (1 - 0.99**t)) + 1e-8)
            # 1 - b2**t cancels: float32 keeps 5 digits of 1 - 0.99.
            tolerance = 1e-5 if dtype == np.float32 else 1e-13
            np.testing.assert_allclose(found[t - 1], expected, rtol=tolerance, atol=tolerance / 10)


@DTYPES
def test_frozen_is_a_hyper_learning_rate_of_zero(dtype):
    """The same operations: bit for bit, as long as the compiler keeps to them."""
    with jax.enable_x64(dtype == np.float64):
        grads = _gradients(dtype, steps=5, size=40)
        arrays = MadaHyperparams(*(jnp.asarray(x, dtype) for x in INTERIOR))
        frozen = mada(1e-2, arrays, frozen=NAMES)
        learned = mada(1e-2, INTERIOR, hyper_learning_rate=0.0, hyper_start_step=0)
        assert_equal(_loop(frozen, grads), _loop(learned, grads))
        # Compiled, a b + c d is one product and one fused multiply-add, and which of the two
        # products is rounded first depends on the program around it.
        atol = 8 * np.finfo(dtype).eps * 1e-2
        assert_close(directions(frozen, grads), directions(learned, grads), atol=atol)


@pytest.mark.parametrize(
    ("init", "learned"),
    [(INTERIOR, ("beta1",)), (ADAM, ("beta3", "rho")), (ADAM, ("beta2", "c", "gamma"))],
)
def test_some_frozen_coefficients_keep_the_step(init, learned):
    """Every specialisation on a number computes what the general step computes."""
    with jax.enable_x64(True):
        grads = _gradients(np.float64, steps=6, size=40)
        frozen = tuple(name for name in NAMES if name not in learned)
        special = mada(1e-2, init, frozen=frozen, hyper_start_step=0)
        rates = MadaHyperparams(5e-4, 5e-4, 0.1, 0.1, 0.1, 0.1)._asdict()
        rates = {name: rates[name] for name in learned}
        general = mada(1e-2, init, hyper_learning_rate=rates, hyper_start_step=0)
        assert_close(directions(special, grads), directions(general, grads), atol=1e-15)


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (ADAM, {"m", "v"}),
        (ADAM._replace(beta3=0.1), {"m", "v", "n", "gradient"}),
        (ADAM._replace(rho=0.5), {"m", "v", "vbar"}),
        (ADAM._replace(gamma=0.5), {"m", "v", "lion"}),
        (INTERIOR._replace(gamma=0.0), {"lion"}),
        (INTERIOR, set(Moments._fields)),
    ],
)
def test_frozen_coefficients_drop_their_buffers(init, expected):
    state = scale_by_mada(init=init, frozen=NAMES).init(jnp.zeros(3))
    assert {name for name, x in state.moments._asdict().items() if x is not None} == expected
    assert state.gradient is None
