"""Checkpoints: what goes in comes out bit by bit, and what does not fit is refused by name."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.training.checkpoint import FORMAT_VERSION, Checkpoints

IDENTITY = {"experiment": "mada", "arm": "adam"}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Frozen:
    names: tuple[str, ...] = ("gamma", "c")


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    key: Any


def make_state(step=0, scale=1.0, width=4, dtype=jnp.float32):
    params = {
        "layer/~/0": {"w.x": scale * jnp.arange(8.0 * width, dtype=dtype).reshape(8, width)},
        "half": scale * jnp.ones(3, jnp.bfloat16) / 3,
        "nothing": jnp.zeros((0, 2)),
    }
    opt_state = (Frozen(), None, {"mu": jnp.full(3, jnp.nan), "none": None, "empty": {}}, [])
    return State(jnp.int32(step), params, opt_state, jax.random.split(jax.random.key(step), 2))


def assert_same(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.fixture
def open_checkpoints(tmp_path):
    opened = []

    def open_them(**changes):
        arguments = {"identity": IDENTITY} | changes
        opened.append(Checkpoints(tmp_path / "checkpoints", **arguments))
        return opened[-1]

    yield open_them
    for checkpoints in opened:
        checkpoints.close()


def saved_steps(checkpoints):
    checkpoints.wait()
    return sorted(int(p.name) for p in pathlib.Path(checkpoints.directory).iterdir())


def test_round_trip(open_checkpoints):
    state = make_state(7)
    checkpoints = open_checkpoints()
    assert checkpoints.restore(state) is None
    checkpoints.save(7, state, {"index": 9, "fingerprint": "abc"})
    checkpoints.close()
    abstract = jax.eval_shape(lambda: state)
    for target in (make_state(0, scale=0.0), abstract):
        restored, data_state, step = open_checkpoints().restore(target)
        assert_same(restored, state)
        assert (step, data_state) == (7, {"index": 9, "fingerprint": "abc"})


def test_state_may_be_donated_while_it_is_written(open_checkpoints):
    update = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    checkpoints = open_checkpoints(keep=9)
    state, expected = {"w": jnp.zeros((512, 1024))}, {}
    for step in range(1, 6):
        state = update(state)
        checkpoints.save(step, state, {})
        expected[step] = float(step)
        state = update(update(state))
        state = jax.tree.map(lambda leaf: leaf - 2, state)
    checkpoints.wait()
    for step in range(5, 0, -1):
        restored, _, got = checkpoints.restore(state)
        assert got == step
        np.testing.assert_array_equal(restored["w"], expected[step])
        checkpoints._manager.delete(step)


def test_restores_onto_another_mesh(open_checkpoints):
    def placed(shape, spec):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        leaf = jnp.arange(64.0).reshape(8, 8)
        key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
        return {"w": jax.device_put(leaf, NamedSharding(mesh, spec)), "key": key}

    before, after = placed((4, 2), P("data", "model")), placed((2, 4), P("model", None))
    checkpoints = open_checkpoints()
    checkpoints.save(1, before, {})
    restored, _, _ = checkpoints.restore(after)
    assert_same(restored, after)
    assert restored["w"].sharding == after["w"].sharding
    assert restored["key"].sharding.is_equivalent_to(after["key"].sharding, 0)


def test_keeps_last_and_best(open_checkpoints):
    state = make_state()
    checkpoints = open_checkpoints(keep=2, best_metric="loss")
    measured = {1: np.nan, 2: np.array([1.0, 2.0]), 3: 4.0, 4: -np.inf, 5: 3.0}
    for step, loss in measured.items():
        checkpoints.save(step, make_state(step), {"index": step}, {"loss": loss, "other": 0.0})
    checkpoints.save(6, make_state(6), {"index": 6})  # nothing was measured
    assert saved_steps(checkpoints) == [2, 5, 6]
    checkpoints.close()
    checkpoints = open_checkpoints(keep=2, best_metric="loss")
    restored, data_state, step = checkpoints.restore(state, best=True)
    assert (step, data_state) == (2, {"index": 2})
    assert_same(restored, make_state(2))
    assert checkpoints.restore(state)[2] == 6
    checkpoints.save(7, make_state(7), {}, {"loss": 0.5})
    assert saved_steps(checkpoints) == [6, 7]


def test_keeps_last_without_a_metric(open_checkpoints):
    checkpoints = open_checkpoints(keep=1)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {}, {"loss": 1.0 / step})
    assert saved_steps(checkpoints) == [3]
    assert checkpoints.restore(make_state(), best=True) is None


def truncate(pattern, share):
    def damage(step):
        files = [path for path in step.glob(pattern) if path.is_file()]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return damage


def remove(name):
    def damage(step):
        path = step / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


DAMAGES = {
    "arrays cut": truncate("state/**/d/*", 0.5),
    "arrays empty": truncate("state/**/d/*", 0.0),
    "manifest cut": truncate("state/**/manifest.ocdbt", 0.5),
    "tree metadata cut": truncate("state/_METADATA", 0.5),
    "tree metadata gone": remove("state/_METADATA"),
    "step metadata cut": truncate("_CHECKPOINT_METADATA", 0.5),
    "meta cut": truncate("meta/metadata", 0.5),
    "meta empty": truncate("meta/metadata", 0.0),
    "meta gone": remove("meta"),
    "state gone": remove("state"),
    "everything cut": truncate("**/*", 0.3),
}
HARMLESS = {"tree metadata gone", "step metadata cut"}  # orbax does without


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back_from_a_damaged_step(open_checkpoints, damage, caplog):
    checkpoints = open_checkpoints(best_metric="loss")
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"index": step}, {"loss": 1.0 / step})
    checkpoints.close()
    directory = pathlib.Path(checkpoints.directory)
    DAMAGES[damage](directory / "2")
    caplog.clear()
    checkpoints = open_checkpoints(best_metric="loss")
    restored, data_state, step = checkpoints.restore(make_state())
    ours = [record for record in caplog.records if "set aside" in record.message]
    assert step == (2 if damage in HARMLESS else 1)
    assert len(ours) == 2 - step
    if step == 1:
        assert "step 2" in ours[0].message
        assert "falling back to step 1" in ours[0].message
        assert (directory / "2.damaged").is_dir()
    assert data_state == {"index": step}
    assert_same(restored, make_state(step))
    checkpoints.save(step + 1, make_state(step + 1), {}, {"loss": 0.1})  # goes on from there
    checkpoints.wait()
    assert checkpoints.restore(make_state())[2] == step + 1


def test_leftovers_of_a_killed_save_are_ignored(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1), {})
    checkpoints.close()
    directory = pathlib.Path(checkpoints.directory)
    shutil.copytree(directory / "1", directory / "2.orbax-checkpoint-tmp")
    (directory / "2.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    checkpoints = open_checkpoints()
    assert checkpoints.restore(make_state())[2] == 1
    checkpoints.save(2, make_state(2), {})
    checkpoints.close()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


@pytest.mark.bad_input
def test_all_damaged(open_checkpoints):
    checkpoints = open_checkpoints()
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {})
    checkpoints.close()
    for step in (1, 2):
        DAMAGES["meta gone"](pathlib.Path(checkpoints.directory) / str(step))
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(step 2: .*; step 1"):
        open_checkpoints().restore(make_state())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: make_state(width=5),
            r"\.params\['layer/~/0'\]\['w.x'\]: got float32\[8,4\], expected float32\[8,5\]",
        ),
        (
            lambda s: make_state(dtype=jnp.bfloat16),
            r"\['w.x'\]: got float32\[8,4\], expected bfloat16\[8,4\]",
        ),
        (
            lambda s: s._replace(params=s.params | {"nothing": jnp.zeros((0, 3))}),
            r"\['nothing'\]: got float32\[0,2\], expected float32\[0,3\]",
        ),
        (
            lambda s: s._replace(params=s.params | {"more": jnp.zeros(2)}),
            r"\.params\['more'\]: got nothing, expected float32\[2\]",
        ),
        (
            lambda s: s._replace(opt_state=None),
            r"\.opt_state\[2\]\['mu'\]: got float32\[3\], expected nothing",
        ),
        (
            lambda s: s._replace(key=jax.random.split(jax.random.key(0, impl="rbg"), 2)),
            r"\.key: got key<fry>\[2\], expected key<rbg>\[2\]",
        ),
        (
            lambda s: s._replace(key=jax.random.key_data(s.key)),
            r"\.key: got key<fry>\[2\], expected uint32\[2,2\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_named(open_checkpoints, change, message):
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(), {})
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(change(make_state()))
    assert checkpoints.restore(make_state())[2] == 1  # nothing was set aside


@pytest.mark.bad_input
def test_many_differences_stay_one_line(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(1, {str(i): jnp.zeros(1) for i in range(9)}, {})
    with pytest.raises(ValueError, match=r"\['4'\].* and 4 more; use the configuration"):
        checkpoints.restore({str(i): jnp.zeros(2) for i in range(9)})


@pytest.mark.bad_input
def test_other_runs_and_formats(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(), {})
    checkpoints.wait()
    other = open_checkpoints(identity=IDENTITY | {"arm": "lion"})
    with pytest.raises(ValueError, match=r"belongs to .*'adam'.*expected .*'lion'"):
        other.restore(make_state())
    meta = pathlib.Path(checkpoints.directory) / "1" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    assert content["format_version"] == FORMAT_VERSION
    meta.write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99, expected 1"):
        checkpoints.restore(make_state())


@pytest.mark.bad_input
def test_bad_arguments(open_checkpoints):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        open_checkpoints(keep=0)
    with pytest.raises(ValueError, match=r"'loss' is not among the metrics \['accuracy'\]"):
        open_checkpoints(best_metric="loss").save(1, make_state(), {}, {"accuracy": 1.0})
