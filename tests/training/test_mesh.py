"""Tests of meshes, sharding rules and the start of several processes."""

import contextlib
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.training.mesh import (
    batch_sharding,
    init_sharded,
    initialize_distributed,
    jit_step,
    make_mesh,
    memory_report,
    param_shardings,
    parse_mesh,
    put_batch,
    state_shardings,
)
from icmljax.training.state import init_state, make_train_step

RULES = [("layers/.*kernel", P(None, "data", "model")), ("kernel", P("data", "model"))]


def init_params(key):
    keys = jax.random.split(key, 3)
    return {
        "input": {"kernel": jax.random.normal(keys[0], (4, 8)) / 2, "bias": jnp.zeros(8)},
        "layers": {"kernel": jax.random.normal(keys[1], (3, 8, 8)) / 3},  # three stacked layers
        "output": {"kernel": jax.random.normal(keys[2], (8, 1)) / 3},
    }


def loss_fn(params, batch, key):
    hidden = batch["x"] @ params["input"]["kernel"] + params["input"]["bias"]
    hidden, _ = jax.lax.scan(
        lambda h, w: (h + jnp.tanh(h @ w), None), hidden, params["layers"]["kernel"]
    )
    noise = 0.1 * jax.random.normal(key, ())
    error = hidden @ params["output"]["kernel"] - batch["y"] + noise
    return jnp.mean(error**2), {"error": jnp.mean(error)}


def make_batch(rows=16):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x[:, :1]}


def adam():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def init_fn(key):
    return init_state(init_params(key), adam(), jax.random.fold_in(key, 1))


def values(tree):
    """All leaves as numpy arrays, keys as their bits."""

    def value(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(value, tree)


def specs(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


# Meshes.


def test_parse_mesh():
    assert parse_mesh("data=4,model=2") == {"data": 4, "model": 2}
    assert parse_mesh(" model = 2 , expert=3") == {"model": 2, "expert": 3}


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (None, {"data": 8, "model": 1}),
        ("data=8", {"data": 8, "model": 1}),
        ("model=8", {"data": 1, "model": 8}),
        ("model=2,data=4", {"data": 4, "model": 2}),
        ("expert=2,data=4", {"data": 4, "model": 1, "expert": 2}),
    ],
)
def test_make_mesh(spec, shape):
    mesh = make_mesh(spec)
    assert dict(mesh.shape) == shape
    assert list(mesh.axis_names) == list(shape)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(jax.devices())


def test_make_mesh_of_some_devices():
    mesh = make_mesh("data=2", jax.devices()[2:4])
    assert list(mesh.devices.flat) == jax.devices()[2:4]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "spec", ["", "data", "data=", "data=x", "data=-1", "data=0", "4", "data=4,"]
)
def test_bad_mesh_is_explained(spec):
    with pytest.raises(ValueError, match=f"bad mesh '{spec}'.*expected axis=size"):
        parse_mesh(spec)


@pytest.mark.bad_input
def test_bad_meshes_are_explained():
    with pytest.raises(ValueError, match="axis 'data' is given twice"):
        parse_mesh("data=2,data=4")
    with pytest.raises(ValueError, match="needs 6 devices, but there are 8"):
        make_mesh("data=3,model=2")
    with pytest.raises(ValueError, match="needs 8 devices, but there are 3"):
        make_mesh("data=8", jax.devices()[:3])


# Rules.


def test_first_rule_that_matches_decides_and_the_rest_is_replicated():
    mesh = make_mesh("data=4,model=2")
    shardings = param_shardings(jax.eval_shape(init_params, jax.random.key(0)), RULES, mesh)
    assert specs(shardings) == {
        "input": {"kernel": P("data", "model"), "bias": P()},
        "layers": {"kernel": P(None, "data", "model")},
        "output": {"kernel": P("data", None)},  # 2 does not divide 1
    }
    assert {sharding.mesh for sharding in jax.tree.leaves(shardings)} == {mesh}
    params = jax.device_put(init_params(jax.random.key(0)), shardings)
    assert params["layers"]["kernel"].addressable_shards[0].data.shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(("data", "model")), (16, 3), P(("data", "model"))),
        (P(("data", "model")), (4, 3), P("data")),  # 4 rows are spread over "data" alone
        (P(("data", "model")), (6, 3), P("model")),
        (P(None, "data"), (16, 3), P(None, None)),
        (P("data"), (0, 3), P("data")),
        (P(), (), P()),
    ],
)
def test_axes_that_do_not_divide_are_dropped(spec, shape, expected):
    mesh = make_mesh("data=4,model=2")
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert param_shardings({"w": leaf}, [("^w$", spec)], mesh)["w"].spec == expected
    assert param_shardings([leaf], [("^w$", spec)], mesh)[0].spec == P()


@pytest.mark.bad_input
def test_bad_rules_are_explained():
    mesh, params = make_mesh("data=4,model=2"), {"block": {"w": jnp.zeros((4, 4))}}
    with pytest.raises(
        ValueError, match=r"names mesh axes \['heads'\]; the mesh has \['data', 'mod"
    ):
        param_shardings(params, [("nowhere", P(("data", "heads")))], mesh)
    with pytest.raises(
        ValueError, match=r"has 3 entries, but parameter 'block/w' has shape \(4, 4\)"
    ):
        param_shardings(params, [("w", P(None, None, "data"))], mesh)
    with pytest.raises(ValueError, match=r"rule '\*w' is not a regular expression"):
        param_shardings(params, [("*w", P())], mesh)


def decay(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.parametrize(
    ("tx", "copies"),
    [
        (optax.sgd(1e-2), 0),
        (optax.adam(1e-2), 2),
        (adam(), 2),
        (optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation(), 3),
        (optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0, 10)), 2),
    ],
    ids=["sgd", "adam", "clip+adamw", "multi_steps", "inject"],
)
def test_copies_of_the_parameters_are_sharded_like_them(tx, copies):
    mesh = make_mesh("data=4,model=2")
    state = jax.eval_shape(lambda key: init_state(init_params(key), tx, key), jax.random.key(0))
    shardings = state_shardings(state, tx, RULES, mesh)
    jax.tree.map(lambda *_: None, state, shardings)  # fails unless the structures agree
    assert shardings.params == param_shardings(state.params, RULES, mesh)
    assert shardings.step.spec == shardings.key.spec == P()
    for shape in [(4, 8), (3, 8, 8), (8,)]:
        sharding = {(4, 8): P("data", "model"), (3, 8, 8): P(None, "data", "model"), (8,): P()}
        found = [
            spec.spec
            for leaf, spec in zip(
                jax.tree.leaves(state.opt_state), jax.tree.leaves(shardings.opt_state), strict=True
            )
            if leaf.shape == shape
        ]
        assert found == [sharding[shape]] * copies


def test_masked_and_factored_optimizers():
    mesh = make_mesh("data=4,model=2")
    masked = optax.masked(optax.adam(1e-2), decay)
    state = jax.eval_shape(lambda key: init_state(init_params(key), masked, key), jax.random.key(0))
    shardings = state_shardings(state, masked, RULES, mesh)
    moments = shardings.opt_state.inner_state[0].mu
    assert moments["input"] == {
        "kernel": NamedSharding(mesh, P("data", "model")),
        "bias": optax.MaskedNode(),
    }

    factored = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    params = {"w": {"kernel": jnp.zeros((16, 8))}}
    state = init_state(params, factored, jax.random.key(0))
    shardings = state_shardings(state, factored, RULES, mesh)
    assert state.opt_state[0].v_row["w"]["kernel"].ndim == 1
    jax.device_put(state, shardings)  # fails if a sharding does not fit its leaf
    assert shardings.opt_state[0].v_row["w"]["kernel"].spec == P()


def test_population_of_states_keeps_its_first_axis_whole():
    mesh = make_mesh("data=4,model=2")
    rules = [
        ("layers/.*kernel", P(None, None, "data", "model")),
        ("kernel", P(None, "data", "model")),
    ]
    keys = jax.random.split(jax.random.key(0), 3)
    population = jax.eval_shape(jax.vmap(init_fn), keys)
    shardings = state_shardings(population, adam(), rules, mesh)
    state = jax.jit(jax.vmap(init_fn), out_shardings=shardings)(keys)
    step = jit_step(jax.vmap(make_train_step(loss_fn, adam()), in_axes=(0, None)), mesh, shardings)
    state, metrics = step(state, put_batch(make_batch(), mesh))
    assert metrics["loss"].shape == (3,)
    assert state.opt_state[1][0].mu["input"]["kernel"].addressable_shards[0].data.shape == (3, 1, 4)


# State and step on eight devices.


@pytest.mark.parametrize("spec", ["data=4,model=2", "data=8", "model=8"])
def test_init_sharded_has_the_values_of_one_device(spec):
    mesh, key = make_mesh(spec), jax.random.key(3)
    state, shardings = init_sharded(init_fn, key, adam(), RULES, mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    jax.tree.map(
        lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7),
        values(state),
        values(init_fn(key)),
    )


@pytest.mark.parametrize("grad_accumulation", [1, 2])
def test_a_step_on_eight_devices_is_a_step_on_one(grad_accumulation):
    step = make_train_step(loss_fn, adam(), grad_accumulation=grad_accumulation)
    results = {}
    for spec, devices in [("data=4,model=2", jax.devices()), ("data=1", jax.devices()[:1])]:
        mesh = make_mesh(spec, devices)
        state, shardings = init_sharded(init_fn, jax.random.key(3), adam(), RULES, mesh)
        sharded_step = jit_step(step, mesh, shardings)
        for _ in range(2):
            state, metrics = sharded_step(state, put_batch(make_batch(), mesh))
        # Equivalent rather than equal: jit drops trailing None from the specs.
        assert all(
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf, sharding in zip(
                jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True
            )
        )
        results[spec] = values((state, metrics))
    eight, one = results.values()
    jax.tree.map(
        lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5),
        eight,
        one,
    )
    before = values(init_fn(jax.random.key(3)))
    assert np.abs(eight[0].params["input"]["bias"] - before.params["input"]["bias"]).max() > 1e-3


def test_jit_step_donates_the_state():
    mesh = make_mesh(None)
    state, shardings = init_sharded(init_fn, jax.random.key(0), adam(), RULES, mesh)
    new, _ = jit_step(make_train_step(loss_fn, adam()), mesh, shardings)(
        state, put_batch(make_batch(), mesh)
    )
    assert state.params["input"]["kernel"].is_deleted()
    assert not new.params["input"]["kernel"].is_deleted()


def test_micro_batches_stay_where_their_rows_are():
    mesh = make_mesh("data=8")
    state, shardings = init_sharded(init_fn, jax.random.key(0), adam(), [], mesh)
    step = make_train_step(loss_fn, adam(), grad_accumulation=2)
    text = (
        jit_step(step, mesh, shardings)
        .lower(state, put_batch(make_batch(16), mesh))
        .compile()
        .as_text()
    )
    assert text and "all-reduce" in text  # of the gradients
    assert not any(op in text for op in ("all-gather", "all-to-all", "collective-permute"))


def test_put_batch_spreads_rows_over_data():
    mesh = make_mesh("data=4,model=2")
    batch = put_batch(make_batch(8), mesh)
    assert batch["x"].sharding == batch_sharding(mesh)
    assert batch["x"].addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(batch["x"], make_batch(8)["x"])


@pytest.mark.bad_input
def test_batches_that_cannot_be_spread_are_explained():
    mesh = make_mesh("data=4,model=2")
    with pytest.raises(ValueError, match=r"\['x'\] has shape \(6, 4\).*a multiple of 4"):
        put_batch(make_batch(6), mesh)
    with pytest.raises(ValueError, match=r"\['t'\] has shape \(\)"):
        put_batch({"t": np.float32(1)}, mesh)


def test_memory_report_counts_bytes_per_device():
    mesh = make_mesh("data=4,model=2")
    state = jax.eval_shape(init_fn, jax.random.key(0))
    shardings = state_shardings(state, adam(), RULES, mesh)
    batch = jax.eval_shape(make_batch)
    compiled = (
        jit_step(make_train_step(loss_fn, adam()), mesh, shardings).lower(state, batch).compile()
    )
    for leaf in compiled.input_shardings[0][1].values():
        assert leaf.is_equivalent_to(batch_sharding(mesh), 2)  # although the shapes did not say so
    report = memory_report(compiled, state, shardings)
    params = 4 * (4 * 8 // 8 + 8 + 3 * 8 * 8 // 8 + 8 // 4)  # bytes of float32
    assert report["params"] == params
    counters = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    assert report["optimizer_state"] == 2 * params + 4 * len(counters)
    plan = compiled.memory_analysis()
    assert plan and report["temporaries"] == plan.temp_size_in_bytes > 0


# Several processes.

WORKER = """
import json, sys
import jax, numpy as np
from icmljax.training.mesh import *
address, num_processes, process_id, timeout_s = sys.argv[1:]
initialize_distributed(address, int(num_processes), int(process_id), float(timeout_s))
from icmljax.training.state import make_train_step
from tests.training import test_mesh as t
mesh = make_mesh(None)
mine = put_batch(np.full((1, 1), 10.0 ** jax.process_index(), np.float32), mesh)
total = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=t.P("data"), out_specs=t.P()
    )
)(mine)
state, shardings = init_sharded(t.init_fn, jax.random.key(3), t.adam(), t.RULES, mesh)
rows = jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], t.make_batch())
step = jit_step(make_train_step(t.loss_fn, t.adam()), mesh, shardings)
state, metrics = step(state, put_batch(rows, mesh))
try:
    make_mesh("model=2")
    refusal = ""
except ValueError as error:
    refusal = str(error)
print(json.dumps({
    "processes": jax.process_count(), "total": float(total[0, 0]), "loss": float(metrics["loss"]),
    "grad_norm": float(metrics["grad_norm"]), "refusal": refusal,
}))
"""


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start_worker(address, num_processes, process_id, timeout_s):
    command = [sys.executable, "-c", WORKER, address, num_processes, process_id, timeout_s]
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )


def test_two_processes_train_together():
    address = f"127.0.0.1:{free_port()}"
    workers = [start_worker(address, 2, process_id, 60) for process_id in (1, 0)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert results[0] == results[1]
    assert results[0]["processes"] == 2
    assert results[0]["total"] == 11.0
    assert "several of the 2 processes" in results[0]["refusal"]
    step = jax.jit(make_train_step(loss_fn, adam()))
    _, expected = step(init_fn(jax.random.key(3)), make_batch())
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-4)


@pytest.mark.bad_input
def test_missing_peer_missing_coordinator_and_busy_port_end_with_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        cases = {
            "of 2 processes these did not report to process 0 on port .* in time: 1;": (
                free_port(),
                0,
            ),
            "process 1 of 2 did not get an answer from process 0": (free_port(), 1),
            f"process 0 cannot listen on port {port} ": (port, 0),
        }
        workers = {
            start_worker(f"127.0.0.1:{number}", 2, process_id, 0.5): message
            for message, (number, process_id) in cases.items()
        }
        for worker, message in workers.items():
            _, errors = worker.communicate(timeout=60)
            assert worker.returncode == 1, errors  # a C++ abort ends with a signal, below 0
            assert re.match(f"RuntimeError: {message}", errors.splitlines()[-1]), errors


def meet(monkeypatch, processes, num_processes, timeout_s=20.0, port=None):
    """Runs the rendezvous in threads; returns by process what went wrong, or None."""
    started = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: started.append(args[2]))
    address = f"127.0.0.1:{port or free_port()}"
    outcomes: dict[int, str | None] = {}

    def join(name, process_id, delay, num):
        time.sleep(delay)
        try:
            initialize_distributed(address, num, process_id, timeout_s)
            outcomes[name] = None
        except RuntimeError as error:
            outcomes[name] = str(error)

    threads = [
        threading.Thread(target=join, args=(index, process_id, delay, num))
        for index, (process_id, delay, num) in enumerate(
            (*process, num_processes)[:3] for process in processes
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(started) == sum(problem is None for problem in outcomes.values())
    return [outcomes[index] for index in range(len(processes))]


def test_rendezvous_lets_all_go_whoever_comes_first(monkeypatch):
    assert meet(monkeypatch, [(0, 0.0)], 1) == [None]
    assert meet(monkeypatch, [(2, 0.0), (0, 0.3), (1, 0.5)], 3) == [None] * 3


def test_rendezvous_can_be_repeated_at_once_on_the_same_port(monkeypatch):
    port = free_port()
    for _ in range(2):
        assert meet(monkeypatch, [(0, 0.0), (1, 0.0)], 2, port=port) == [None] * 2


@pytest.mark.parametrize(
    "processes",
    [
        [(0, 0.0), (2, 0.6), (1, 0.9)],  # the lost process 1 is noticed when process 2 comes
        [(0, 0.0), (1, 0.6), (2, 0.9)],  # or when process 1 comes again
    ],
)
def test_rendezvous_ignores_strangers_and_peers_that_hung_up(monkeypatch, processes):
    port = free_port()
    hello = b'{"run": "icmljax", "num_processes": 3, "process_id": 1}\n'
    calls = [(b"GET / HTTP/1.1\r\n\r\n", 0), (b"[1]\n", 0), (b"", 0), (hello, 0.3)]

    def call():
        for words, stay in calls:
            for _ in range(100):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port)) as connection,
                ):
                    connection.sendall(words)
                    time.sleep(stay)
                    break
                time.sleep(0.02)

    thread = threading.Thread(target=call)
    thread.start()
    outcomes = meet(monkeypatch, processes, 3, port=port)
    thread.join()
    assert outcomes == [None] * 3


@pytest.mark.bad_input
def test_all_processes_hear_why_a_rendezvous_failed(monkeypatch):
    twice = meet(monkeypatch, [(0, 0.0), (1, 0.2), (1, 0.4)], 3)
    assert set(twice) == {"two processes have process_id=1; give each its own number"}
    missing = meet(monkeypatch, [(0, 0.0), (1, 0.2)], 4, timeout_s=0.8)
    assert missing[0] == missing[1]
    assert "of 4 processes these did not report to process 0" in missing[0]
    assert "in time: 2, 3;" in missing[0]
    numbers = meet(monkeypatch, [(0, 0.0), (1, 0.2, 3)], 2)
    assert set(numbers) == {
        "process 1 was started for 3 processes, process 0 for 2; give all the same number"
    }


@pytest.mark.bad_input
def test_somebody_else_at_the_coordinator_address(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"220 mail.example.com\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        [problem] = meet(monkeypatch, [(1, 0.0)], 2, timeout_s=0.5, port=port)
    assert "process 1 of 2 did not get an answer from process 0" in problem


@pytest.mark.bad_input
def test_failure_inside_jax_is_one_sentence(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("too late\nmore lines")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(RuntimeError, match="process 0 of 1 could not start jax at .*: too late$"):
        initialize_distributed(f"127.0.0.1:{free_port()}", 1, 0, 5.0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost", 2, 0), "'localhost'; expected host:port"),
        ((":1234", 2, 0), "':1234'; expected host:port"),
        (("localhost:http", 2, 0), "expected host:port"),
        (("localhost:70000", 2, 0), "expected host:port"),
        (("localhost:1234", 2, 2), "process_id=2 with num_processes=2"),
        (("localhost:1234", 0, 0), "process_id=0 with num_processes=0"),
        (("localhost:1234", 2, -1), "process_id=-1"),
        (("localhost:1234", 2, 1, 0), "timeout_s=0"),
    ],
)
def test_bad_arguments_of_a_distributed_start(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize_distributed(*arguments)
