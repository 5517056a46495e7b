"""MADA as a JAX citizen: transforms, meshes, dtypes, checkpoints, freezing, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.optimizers.mada import (
    DEFAULT_INIT,
    NAMES,
    MadaHyperparams,
    freeze,
    hyper_adam,
    hyper_gradient,
    hyperparams,
    mada,
    scale_by_mada,
)
from icmljax.training.checkpoint import Checkpoints
from icmljax.training.mesh import make_mesh
from tests.optimizers.common import (
    ADAM,
    INTERIOR,
    assert_close,
    assert_equal,
    mada_state,
    quadratic,
    replay,
    stacked,
    train,
)

LOSS, PARAMS, NOISE = quadratic(shapes={"w": (16, 8)})
NOISE = jax.tree.map(lambda e: e[:10], NOISE)
RATE = optax.linear_schedule(0.05, 0.01, 10)
# No sign in the step amplifies rounding, so that programs that round differently stay together.
SMOOTH = MadaHyperparams(0.8, 0.9, 0.3, 0.4, 1.0, 1.0)


def smooth(init=SMOOTH, **options):
    init = init._replace(c=1.0, gamma=1.0)
    return mada(RATE, init, frozen=("c", "gamma"), hyper_start_step=0, hyper_momentum=0.5,
                **options)  # fmt: skip


def step(optimizer, params, state, noise):
    updates, state = optimizer.update(jax.grad(LOSS)(params, noise), state, params)
    return optax.apply_updates(params, updates), state


jitted_step = jax.jit(functools.partial(step, smooth()))


@jax.jit
def smooth_run(params, noise, init):
    (params, state), hyper = train(smooth(MadaHyperparams(*init)), LOSS, params, noise)
    return params, state, jnp.stack(hyper, axis=-1)


@functools.cache
def expected():
    return smooth_run(PARAMS, NOISE, SMOOTH)


def row(t):
    return jax.tree.map(lambda e: e[t], NOISE)


def loop(one_step, params, state, steps):
    for t in steps:
        params, state = one_step(params, state, row(t))
    return params, state


# ------------------------------------------------------------------------------ transforms


def test_scan_is_a_loop():
    params, state = loop(jitted_step, PARAMS, smooth().init(PARAMS), range(10))
    assert_close(params, expected()[0], atol=1e-6)
    assert_close(stacked(hyperparams(state)), expected()[2][-1], atol=1e-6)
    assert (np.ptp(expected()[2][:, :4], axis=0) > 1e-4).all()


def test_jit_is_eager():
    eager = functools.partial(step, smooth())
    params, state = loop(eager, PARAMS, smooth().init(PARAMS), range(3))
    jit_params, jit_state = loop(jitted_step, PARAMS, smooth().init(PARAMS), range(3))
    assert jax.tree.structure(state) == jax.tree.structure(jit_state)
    assert_close(params, jit_params, atol=1e-6)
    assert_close(hyperparams(state), hyperparams(jit_state), atol=1e-6)


def test_vmap_over_starts_and_seeds_is_a_loop():
    inits = np.float32([SMOOTH, SMOOTH._replace(beta1=0.5), SMOOTH._replace(beta2=0.7, rho=0.9)])
    noises = jax.tree.map(lambda e: jnp.stack([e, e[::-1], 2 * e]), NOISE)
    inits_by_name = MadaHyperparams(*inits.T)
    params, _, hyper = jax.vmap(smooth_run, in_axes=(None, 0, 0))(PARAMS, noises, inits_by_name)
    for i, init in enumerate(inits):
        one = smooth_run(PARAMS, jax.tree.map(lambda e, i=i: e[i], noises), tuple(init))
        assert_close(jax.tree.map(lambda x, i=i: x[i], params), one[0], atol=1e-6)
        np.testing.assert_allclose(hyper[i], one[2], atol=1e-6)


def test_eight_devices_are_one():
    mesh = make_mesh("data=4,model=2")
    optimizer = smooth()
    shardings = {"w": NamedSharding(mesh, P("data", "model"))}
    abstract = jax.eval_shape(optimizer.init, PARAMS)
    state_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    params = jax.device_put(PARAMS, shardings)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)

    @functools.partial(jax.jit, out_shardings=(shardings, state_shardings))
    def run(params, state):
        return train(optimizer, LOSS, params, NOISE, state)[0]

    params, state = run(params, state)
    own = mada_state(state)
    buffers = [x for x in (*own.moments, own.gradient) if x is not None]
    assert len(buffers) == 6  # c and gamma are frozen at 1: no Lion
    for buffer in buffers:
        assert buffer["w"].sharding.is_equivalent_to(shardings["w"], 2)
        assert buffer["w"].addressable_shards[0].data.shape == (4, 4)
    assert own.hyper.beta1.sharding.is_fully_replicated
    assert_close(params, expected()[0], atol=1e-6)
    assert_close(stacked(own.hyper), expected()[2][-1], atol=1e-6)


def test_shard_map_with_axis_name_is_one_device():
    mesh = make_mesh("data=8")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(None, "data")),
        out_specs=(P("data"), P()),
    )
    def run(params, noise):
        optimizer = smooth(axis_name="data")
        (params, _), hyper = train(optimizer, LOSS, params, noise)
        return params, hyper

    params, hyper = run(PARAMS, NOISE)
    assert_close(params, expected()[0], atol=1e-6)
    assert_close(stacked(hyper), expected()[2], atol=1e-6)


def test_donated_buffers():
    donating = jax.jit(functools.partial(step, smooth()), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, PARAMS)
    state = jax.jit(smooth().init)(params)
    first = mada_state(state).moments.m["w"]
    for t in range(10):
        params, state = donating(params, state, row(t))
    assert first.is_deleted()
    assert_close(params, expected()[0], atol=1e-6)


def test_no_retrace_when_values_change():
    traces = []

    @jax.jit
    def run(init, rate, eps, state, g):
        traces.append(None)
        return mada(rate, init, eps=eps).update(g, state)[1]

    for rate, init in ((0.1, INTERIOR), (0.2, ADAM), (0.0, DEFAULT_INIT)):
        init = MadaHyperparams(*map(jnp.float32, init))
        rate, eps = jnp.float32(rate), jnp.float32(rate / 100)
        state = mada(rate, init, eps=eps).init(jnp.ones(8))
        for _ in range(2):
            state = run(init, rate, eps, state, jnp.ones(8))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [
        (mada(0.1), 7),
        (hyper_adam(0.1), 3),
        (mada(0.1, ADAM, frozen=NAMES), 2),
        (mada(0.1, frozen=("beta3",)), 5),
    ],
)
def test_number_of_parameter_sized_buffers(optimizer, number):
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((100, 10), jnp.float32))
    assert sum(x.size >= 1000 for x in jax.tree.leaves(state)) == number


# ---------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16])
def test_bfloat16_parameters(state_dtype):
    optimizer = mada(0.1, INTERIOR, state_dtype=state_dtype, hyper_start_step=0)
    params = jnp.ones((5, 3), jnp.bfloat16)
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), jnp.bfloat16)
    state, updates, _ = jax.jit(lambda g: replay(optimizer, g, params=params))(grads)
    own = mada_state(state)
    wide = state_dtype or jnp.float32
    assert updates.dtype == jnp.bfloat16
    assert [x.dtype for x in own.moments[:5]] == [wide] * 5
    narrow = state_dtype or jnp.bfloat16
    assert own.gradient.dtype == own.moments.gradient.dtype == narrow
    assert {x.dtype for x in own.hyper} == {jnp.dtype(jnp.float32)}
    assert (stacked(own.hyper) != np.float32(INTERIOR)).all()
    assert jnp.isfinite(updates).all()


def test_bfloat16_gradient_buffer_is_exact_for_bfloat16_gradients():
    """What float32 buffers would give: a bfloat16 gradient loses nothing in bfloat16."""
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), jnp.bfloat16)
    optimizer = mada(0.1, INTERIOR, hyper_start_step=0)
    run = jax.jit(lambda g, p: stacked_hyper(replay(optimizer, g, params=p)[2]))
    narrow = run(grads, jnp.zeros(40, jnp.bfloat16))
    wide = run(grads.astype(jnp.float32), jnp.zeros(40, jnp.float32))
    np.testing.assert_allclose(narrow, wide, atol=1e-6)


def stacked_hyper(states):
    return jnp.stack(mada_state(states).hyper, axis=-1)


def test_count_stops_at_its_largest_value():
    optimizer = scale_by_mada(init=INTERIOR)
    g = jnp.ones(3)
    largest = np.iinfo(np.int32).max
    state = optimizer.init(g)._replace(count=jnp.int32(largest))
    updates, state = jax.jit(optimizer.update)(g, state)
    assert state.count == largest
    assert jnp.isfinite(updates).all() and np.isfinite(stacked(state.hyper)).all()


# ----------------------------------------------------------------------------- checkpoints


def test_resume_from_orbax_is_bit_equal(tmp_path):
    params, state = loop(jitted_step, PARAMS, smooth().init(PARAMS), range(10))
    half = loop(jitted_step, PARAMS, smooth().init(PARAMS), range(5))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: half))
    assert jax.tree.structure(restored) == jax.tree.structure(half)
    assert_equal(restored, half)
    assert_equal(loop(jitted_step, *restored, range(5, 10)), (params, state))


@pytest.mark.bad_input
def test_checkpoint_of_other_frozen_coefficients_names_the_buffers(tmp_path):
    checkpoints = Checkpoints(tmp_path, identity={"experiment": "test"})
    checkpoints.save(1, mada(0.1, ADAM, frozen=("rho",)).init(PARAMS), {})
    checkpoints.wait()
    with pytest.raises(ValueError, match=r"vbar.*got nothing, expected"):
        checkpoints.restore(jax.eval_shape(mada(0.1, ADAM).init, PARAMS))
    checkpoints.close()


# ------------------------------------------------------------------------------------ freeze


def test_freeze_continues():
    """As the same optimizer with a hyper learning rate of 0 goes on."""
    params, state, _ = expected()
    static, frozen_state = freeze(state, RATE)
    found, after = jax.jit(functools.partial(train_static, static))(params, frozen_state)
    same, _ = jax.jit(
        lambda p, s: train(smooth(hyper_learning_rate=0.0), LOSS, p, NOISE, halted(s))[0]
    )(params, state)
    assert_close(found, same, atol=1e-6)
    assert mada_state(after).count == 20
    assert mada_state(after).gradient is None
    assert_close(stacked(hyperparams(after)), stacked(hyperparams(state)), atol=0)


def halted(state):
    """With the velocity of the coefficients at rest: momentum alone would move them on."""
    own, *rest = state
    return (own._replace(velocity=jax.tree.map(jnp.zeros_like, own.velocity)), *rest)


def train_static(static, params, state):
    return train(static, LOSS, params, NOISE, state)[0]


def test_freeze_restarts():
    params, state, _ = expected()
    # Found anywhere in the state of a chain.
    static, start = freeze((optax.EmptyState(), state), RATE, restart=True)
    assert mada_state(start).count == 0
    assert all((x == 0).all() for x in jax.tree.leaves(mada_state(start).moments))
    values = MadaHyperparams(*(float(x) for x in hyperparams(state)))
    fresh = mada(RATE, values, frozen=NAMES)
    run = jax.jit(lambda p: (train_static(static, p, start), train_static(fresh, p, fresh.init(p))))
    (found, _), (same, _) = run(params)
    assert_equal(found, same)


def test_freeze_before_the_first_update_and_of_a_static_state():
    for optimizer in (mada(0.1, ADAM), mada(0.1, ADAM, frozen=NAMES)):
        static, state = freeze(optimizer.init(PARAMS), 0.1)
        reference = mada(0.1, MadaHyperparams(*map(float, map(np.float32, ADAM))), frozen=NAMES)
        assert_equal(state, reference.init(PARAMS))
        assert jax.tree.structure(state) == jax.tree.structure(static.init(PARAMS))


# --------------------------------------------------------------------------------- bad input

BAD_OPTIONS = [
    (dict(init=ADAM._replace(beta2=0.3)), r"init\.beta2 is 0\.3; expected .* \[0\.501, 0\.99\]"),
    (dict(init=ADAM._replace(beta1=1.0), frozen=("rho",)), r"init\.beta1 is 1\.0"),
    (dict(init={"rho": 1.5}), r"init\.rho is 1\.5"),
    (dict(init={"beta": 0.5}), r"init names \['beta'\]; the coefficients are"),
    (dict(init=0.5), "init is 0.5; expected MadaHyperparams"),
    (dict(eps=-1e-8), "eps is -1e-08"),
    (dict(eps=float("nan")), "eps is nan"),
    (dict(second_moment="mean"), "second_moment is 'mean'; expected one of"),
    (dict(compat="paper"), "compat is 'paper'; expected one of"),
    (dict(hyper_normalization="l2"), "hyper_normalization is 'l2'"),
    (dict(implementation="cuda"), "implementation is 'cuda'"),
    (dict(hyper_learning_rate={"lr": 0.1}), r"hyper_learning_rate names \['lr'\]"),
    (dict(hyper_learning_rate=-0.1), "hyper_learning_rate.beta1 is -0.1"),
    (dict(hyper_momentum=1.5), "hyper_momentum.beta1 is 1.5"),
    (dict(hyper_start_step=-1), "hyper_start_step is -1"),
    (dict(hyper_grad_clip=-1.0), "hyper_grad_clip is -1.0"),
    (dict(bounds={"rho": (0.8, 0.2)}), r"bounds of rho are \(0.8, 0.2\)"),
    (dict(bounds={"rho": (0.7, 0.9)}), r"init\.rho is 0.6; expected a number in \[0.7, 0.9\]"),
    (dict(frozen=("gama",)), "frozen is .*gama"),
    (dict(frozen="gamma"), "frozen is 'gamma'; expected a tuple"),
    (dict(lion_b1=1.5), "lion_b1 is 1.5"),
    (dict(max_after_correction=True), 'needs second_moment="max"'),
    (dict(weight_decay=-0.1), "weight_decay is -0.1"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_option(options, message):
    with pytest.raises(ValueError, match=message):
        mada(0.1, **options)


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_parameters_must_be_real_floating_point(dtype):
    with pytest.raises(ValueError, match=f"parameter 'a/b' has dtype {jnp.dtype(dtype)}"):
        mada(0.1).init({"a": {"b": jnp.zeros(3, dtype)}})


@pytest.mark.bad_input
def test_gradients_of_another_tree():
    optimizer = mada(0.1)
    state = optimizer.init({"a": jnp.ones(3)})
    good, bad = {"a": jnp.ones(3)}, {"b": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"the gradients have the tree .*'b'.*made for .*'a'"):
        optimizer.update(bad, state)
    with pytest.raises(ValueError, match="the gradients have shape .* at 'a'"):
        optimizer.update({"a": jnp.ones((3, 1))}, state)
    with pytest.raises(ValueError, match="hyper_grads have the tree"):
        optimizer.update(good, state, hyper_grads=bad)
    with pytest.raises(ValueError, match="hyper_grads have shape"):
        optimizer.update(good, state, hyper_grads={"a": jnp.ones(4)})
    with pytest.raises(ValueError, match="grads have shape"):
        hyper_gradient(state, {"a": jnp.ones(4)})
    with pytest.raises(ValueError, match="grads have the tree"):
        hyper_gradient(state, bad)


@pytest.mark.bad_input
def test_states_that_are_not_there():
    other = optax.adam(0.1).init(jnp.ones(3))
    two = (mada(0.1).init(jnp.ones(3)), mada(0.1).init(jnp.ones(3)))
    for function in (hyperparams, lambda s: hyper_gradient(s, jnp.ones(3)), lambda s: freeze(s, 1)):
        with pytest.raises(ValueError, match="no MADA state in an optimizer state of type tuple"):
            function(other)
    with pytest.raises(ValueError, match="freeze found 2 MADA states; expected one"):
        freeze(two, 0.1)


@pytest.mark.bad_input
def test_weight_decay_needs_parameters():
    optimizer = mada(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="params"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)))
    without = mada(0.1)
    without.update(jnp.ones(3), without.init(jnp.ones(3)))
