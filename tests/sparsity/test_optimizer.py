"""The masked optimizer: what is masked stays, the rest moves as if it were alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from icmljax.data.digits import load_digits
from icmljax.optimizers.mada import hyperparams, mada
from icmljax.sparsity.masks import apply_masks, as_masks, random_mask
from icmljax.sparsity.optimizer import MaskedState, get_masks, masked, set_masks
from icmljax.training import mesh as mesh_lib
from icmljax.training.checkpoint import Checkpoints
from icmljax.training.state import init_state, make_train_step

OPTIMIZERS = {
    "sgd": optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, 0.9, nesterov=True)),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "lion": optax.lion(3e-3, weight_decay=0.1),
    "mada": mada(1e-2, weight_decay=0.1, hyper_start_step=2, implementation="xla"),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


@functools.cache
def clipped(name):
    """Masked inside a chain."""
    return optax.chain(optax.clip_by_global_norm(1.0), masked(OPTIMIZERS[name], MASKS))


# Pruned at random: w0; dense: b0; frozen in one half: w1; frozen as a whole: b1.
SHAPES = {"w0": (64, 16), "b0": (16,), "w1": (16, 10), "b1": (10,)}
MASKS = {
    "w0": random_mask(jax.random.key(0), (64, 16), 0.3),
    "b0": None,
    "w1": np.arange(160).reshape(16, 10) % 2 == 0,
    "b1": False,
}


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), len(SHAPES))
    params = {
        name: (0.3 * jax.random.normal(key, shape)).astype(dtype)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return params | {"w0": apply_masks(params["w0"], MASKS["w0"])}


PARAMS = make_params()


@functools.cache
def data(rows=128):
    digits = load_digits()
    # Pixels at the border are always 0: shifted, so that every weight has a gradient.
    return {"x": digits.train_images[:rows] - 0.5, "y": digits.train_labels[:rows]}


def loss_fn(params, batch, key=None):
    del key
    hidden = jnp.tanh(batch["x"] @ params["w0"] + params["b0"])
    logits = hidden @ params["w1"] + params["b1"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {}


@functools.cache
def runner(tx, steps):
    @jax.jit
    def run(params, state, batch):
        def step(carry, _):
            params, state = carry
            (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), None, steps)

    return run


def train(tx, params, steps, state=None):
    """Steps on the whole batch, in one compiled scan; losses too."""
    state = tx.init(params) if state is None else state
    (params, state), losses = runner(tx, steps)(params, state, data())
    return params, state, losses


@functools.cache
def after_50(name):
    """Two runs of 25 steps."""
    params, state, losses = train(clipped(name), PARAMS, 25)
    params, state, more = train(clipped(name), params, 25, state)
    return params, state, np.concatenate([losses, more])


def assert_masks_hold(after, before=PARAMS, masks=MASKS):
    """Bit for bit, and all that is live has moved."""
    full = jax.tree.map(lambda m, p: np.broadcast_to(m, p.shape), as_masks(before, masks), before)
    for name, mask in full.items():
        new, old = np.asarray(after[name]), np.asarray(before[name])
        assert new[~mask].tobytes() == old[~mask].tobytes(), name
        assert np.sum(new[mask] == old[mask]) <= 0.1 * mask.sum(), name


# -------------------------------------------------------------------------------- what it keeps


@EACH
def test_masked_entries_stay(name):
    params, state, losses = after_50(name)
    assert losses[-1] < 0.8 * losses[0]
    assert_masks_hold(params)
    jax.tree.map(np.testing.assert_array_equal, get_masks(state), as_masks(PARAMS, MASKS))


def test_without_the_wrapper_they_do_not():
    """The test above can fail."""
    params, _, _ = train(OPTIMIZERS["adamw"], PARAMS, 25)
    with pytest.raises(AssertionError):
        assert_masks_hold(params)


@EACH
def test_live_entries_move_as_the_vector_of_live_entries(name):
    """The inner optimizer sees nothing of the others: norms, moments, hyper-gradients."""
    live = np.array([True, False, True, True, False, True])
    start = jnp.array([0.5, 3.0, -0.4, 0.2, -2.0, 0.1])
    scale = jnp.array([1.0, 30.0, 0.3, 2.0, 50.0, 0.7])
    tx = optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS[name])

    @functools.partial(jax.jit, static_argnums=0)
    def run(tx, params, scale):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: jnp.sum(jnp.cos(scale * p)) + jnp.sum(p**2))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), None, 30)[0]

    params, state = run(masked(tx, live), start, scale)
    alone, alone_state = run(tx, start[live], scale[live])
    np.testing.assert_allclose(params[live], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(params[~live], start[~live])
    if name == "mada":
        learned, expected = (np.stack(hyperparams(s)) for s in (state, alone_state))
        np.testing.assert_allclose(learned, expected, rtol=1e-4)
        assert np.abs(expected - np.stack(hyperparams(tx.init(start)))).max() > 1e-3


def test_gradients_that_are_not_finite_stay_where_they_are_masked():
    tx = masked(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), np.arange(3) > 0)
    updates, _ = tx.update(jnp.array([jnp.nan, 1.0, 2.0]), tx.init(jnp.ones(3)), jnp.ones(3))
    assert updates[0] == 0 and jnp.isfinite(updates).all() and (updates[1:] != 0).all()


# ---------------------------------------------------------------------- inside and around optax


def test_inside_and_around_others_of_optax():
    """Every way to nest them takes the same steps as the plain wrapper."""
    adam = functools.partial(optax.adam, b1=0.8)
    expected, _, _ = train(masked(adam(1e-2), MASKS), PARAMS, 6)
    nests = {
        "inject_outside": optax.inject_hyperparams(lambda rate: masked(adam(rate), MASKS))(1e-2),
        "inject_inside": masked(optax.inject_hyperparams(adam)(1e-2), MASKS),
        "function": masked(adam(1e-2), lambda params: as_masks(params, MASKS)),
        "finite": optax.apply_if_finite(masked(adam(1e-2), MASKS), 3),
        "groups": optax.multi_transform(
            {name: masked(adam(1e-2), MASKS) for name in "ab"},
            {name: "ab"[i % 2] for i, name in enumerate(PARAMS)},
        ),
        "around_groups": masked(
            optax.multi_transform(
                {name: adam(1e-2) for name in "ab"},
                {name: "ab"[i % 2] for i, name in enumerate(PARAMS)},
            ),
            MASKS,
        ),
    }
    for name, tx in nests.items():
        params, state, _ = train(tx, PARAMS, 6)
        for leaf in PARAMS:
            np.testing.assert_allclose(
                params[leaf], expected[leaf], rtol=0, atol=2e-6, err_msg=f"{name} {leaf}"
            )
        jax.tree.map(np.testing.assert_array_equal, get_masks(state), as_masks(PARAMS, MASKS))


@pytest.mark.parametrize("outside", [True, False])
def test_multi_steps(outside):
    inner = OPTIMIZERS["adamw"]
    tx = masked(inner, MASKS) if outside else inner
    tx = optax.MultiSteps(tx, 2).gradient_transformation()
    tx = tx if outside else masked(tx, MASKS)
    params, _, _ = train(tx, PARAMS, 20)
    assert_masks_hold(params)


def test_half_precision():
    params = make_params(jnp.bfloat16)
    after, _, _ = train(masked(OPTIMIZERS["adamw"], MASKS), params, 25)
    assert all(p.dtype == jnp.bfloat16 for p in after.values())
    assert_masks_hold(after, params)


def test_extra_arguments_pass():
    def update(updates, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda u: scale * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = masked(inner, np.array([True, False]))
    updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), scale=3.0)
    np.testing.assert_array_equal(updates, [3, 0])


def test_vmap_over_masks():
    """A population: one mask each."""
    params = jnp.arange(1.0, 4.0)

    def step(mask):
        tx = masked(optax.sgd(1.0), lambda _: mask)
        return tx.update(params, tx.init(params), params)[0]

    np.testing.assert_array_equal(jax.vmap(step)(jnp.eye(3, dtype=bool)), -np.diag([1.0, 2, 3]))


def test_a_callable_tree_of_masks():
    """Modules of equinox can be called and are trees all the same."""
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    masks = eqx.tree_at(lambda m: (m.weight, m.bias), model, (jnp.eye(2, 3, dtype=bool), None),
                        is_leaf=lambda x: x is None)  # fmt: skip
    tx = masked(optax.adamw(0.1), masks)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, model), tx.init(model), model)
    np.testing.assert_array_equal(updates.weight != 0, np.eye(2, 3, dtype=bool))
    assert (updates.bias != 0).all()


# --------------------------------------------------------------------------- masks in the state


NEW_MASKS = MASKS | {"w0": ~MASKS["w0"], "b0": False}


def test_masks_are_replaced_while_training():
    params, state, _ = train(clipped("adamw"), PARAMS, 25)
    replaced = jax.jit(set_masks)(state, as_masks(PARAMS, NEW_MASKS))
    assert jax.tree.structure(replaced) == jax.tree.structure(state)
    np.testing.assert_array_equal(get_masks(replaced)["w0"], NEW_MASKS["w0"])
    after, _, _ = train(clipped("adamw"), params, 25, replaced)
    assert_masks_hold(after, params, NEW_MASKS)


def test_groups_take_their_part_of_new_masks():
    labels = {"w0": "a", "b0": "a", "w1": "b", "b1": "b"}
    groups = {"a": masked(optax.adam(0.1), MASKS), "b": masked(optax.sgd(0.1), MASKS)}
    state = optax.multi_transform(groups, labels).init(PARAMS)
    new = MASKS | {"w0": ~MASKS["w0"], "w1": ~MASKS["w1"]}
    found = get_masks(set_masks(state, new))
    jax.tree.map(np.testing.assert_array_equal, found, as_masks(PARAMS, new))


def test_the_state_owns_its_masks():
    """A step that donates the state leaves the caller's masks alone."""
    masks = as_masks(PARAMS, MASKS)
    tx = masked(optax.sgd(0.1), masks)
    for state in (tx.init(PARAMS), set_masks(tx.init(PARAMS), masks)):
        jax.jit(lambda s: s, donate_argnums=0)(state)
        assert not any(m.is_deleted() for m in jax.tree.leaves(masks))


@pytest.mark.parametrize("name", ["sgd", "mada"])
def test_save_and_restore_in_the_middle(name, tmp_path):
    """Masks come back with all else, not those that the optimizer was made with."""
    params, state, _ = train(clipped(name), PARAMS, 25)
    state = set_masks(state, NEW_MASKS)
    checkpoints = Checkpoints(tmp_path, identity={})
    checkpoints.save(25, (params, state), {})
    checkpoints.wait()
    like = jax.eval_shape(lambda: (PARAMS, clipped(name).init(PARAMS)))
    restored, _, _ = checkpoints.restore(like)
    checkpoints.close()
    after, _, _ = train(clipped(name), restored[0], 25, restored[1])
    expected, _, _ = train(clipped(name), params, 25, state)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert_masks_hold(after, params, NEW_MASKS)


@pytest.mark.parametrize("name", ["adamw", "mada"])
def test_on_a_mesh(name):
    """Masks are sharded as the parameters; the result is that of one device."""
    tx = clipped(name)
    rules = [("^w", P("data", "model")), ("^b0", P("model"))]
    mesh = mesh_lib.make_mesh("data=4,model=2")

    def init(key):
        return init_state(PARAMS, tx, key)

    state, shardings = mesh_lib.init_sharded(init, jax.random.key(0), tx, rules, mesh)
    found = get_masks(state.opt_state)
    assert found["w0"].sharding.spec == P("data", "model") == state.params["w0"].sharding.spec
    assert found["b1"].sharding.is_fully_replicated
    step = mesh_lib.jit_step(make_train_step(loss_fn, tx), mesh, shardings)
    batch = mesh_lib.put_batch(data(), mesh)
    for _ in range(50):
        state, _ = step(state, batch)
    assert_masks_hold(jax.device_get(state.params))
    for leaf, expected in after_50(name)[0].items():
        np.testing.assert_allclose(state.params[leaf], expected, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.bad_input
def test_masks_that_do_not_fit():
    bad = MASKS | {"w1": np.ones((3, 3), bool)}
    for masks in (bad, lambda params: bad):
        with pytest.raises(ValueError, match="mask of 'w1' has shape"):
            masked(optax.sgd(0.1), masks).init(PARAMS)
    tx = masked(optax.sgd(0.1), MASKS)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"missing \['w3'\]"):
        tx.update(PARAMS | {"w3": jnp.ones(2)}, state)
    with pytest.raises(ValueError, match="mask of 'w1' has shape"):
        set_masks(state, bad)
    with pytest.raises(ValueError, match=r"mask of 'b0' has shape \(16,\), expected \(\)"):
        set_masks(state, MASKS | {"b0": np.ones(16, bool)})


@pytest.mark.bad_input
def test_no_masks_or_too_many():
    state = optax.adam(0.1).init(PARAMS)
    for function in (get_masks, functools.partial(set_masks, masks=MASKS)):
        with pytest.raises(ValueError, match="no masked optimizer in a state of type tuple"):
            function(state)
    tx = masked(optax.sgd(0.1), MASKS)
    assert isinstance(tx.init(PARAMS), MaskedState)
    with pytest.raises(ValueError, match="2 masked optimizers in one state share parameters"):
        get_masks(optax.chain(tx, tx).init(PARAMS))
