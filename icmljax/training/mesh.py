"""Device meshes, sharding rules by parameter path, and the start of runs over several hosts."""

import json
import math
import re
import select
import socket
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from icmljax.training.state import TrainState

# A regular expression, searched in the "/"-joined path of a leaf, and the sharding of the leaf.
Rules = Sequence[tuple[str, PartitionSpec]]


def parse_mesh(spec: str) -> dict[str, int]:
    """Reads a mesh from text.

    Args:
      spec: comma-separated axes with their sizes, e.g. "data=4,model=2".

    Returns:
      Axis sizes by name, in the order given.

    Raises:
      ValueError: for bad syntax, an axis given twice, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*", part)
        if not match or int(match[2]) < 1:
            raise ValueError(
                f"bad mesh {spec!r}: got {part!r}; expected axis=size with a size of 1 or more, "
                'like "data=4,model=2"'
            )
        if match[1] in sizes:
            raise ValueError(f"bad mesh {spec!r}: axis {match[1]!r} is given twice")
        sizes[match[1]] = int(match[2])
    return sizes


def make_mesh(spec: str | None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh of a run.

    Args:
      spec: as for ``parse_mesh``; None puts all devices on "data".
      devices: devices to use, all of them by default.

    Returns:
      A mesh that always has the axes "data" and "model" (of size 1 unless given), in this order and
      before any other axis.

    Raises:
      ValueError: for a bad spec, if the sizes do not multiply to the number of devices, or if two
        processes would have to feed the same rows of a batch.
    """
    devices = jax.devices() if devices is None else list(devices)
    given = {"data": len(devices)} if spec is None else parse_mesh(spec)
    if math.prod(given.values()) != len(devices):
        raise ValueError(
            f"mesh {spec!r} needs {math.prod(given.values())} devices, but there are "
            f"{len(devices)}; choose sizes that multiply to {len(devices)}"
        )
    sizes = {"data": 1, "model": 1} | given
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices,
    )
    processes = len({device.process_index for device in devices})
    if processes > 1 and mesh.local_mesh.shape["data"] * processes != sizes["data"]:
        raise ValueError(
            f"mesh {spec!r} spreads the same rows of a batch over several of the {processes} "
            f"processes; let data={sizes['data']} be a multiple of {processes} and the other axes "
            "fit into one process"
        )
    return mesh


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _check_rules(rules: Rules, mesh: Mesh) -> None:
    for pattern, spec in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"rule {pattern!r} is not a regular expression: {error}; correct the pattern"
            ) from error
        unknown = {axis for entry in spec for axis in _axes(entry)} - set(mesh.axis_names)
        if unknown:
            raise ValueError(
                f"rule {pattern!r} names mesh axes {sorted(unknown)}; "
                f"the mesh has {list(mesh.axis_names)}"
            )


def _fit(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Drops from every dimension the axes that do not divide it."""
    entries: list[str | tuple[str, ...] | None] = []
    for entry, size in zip(spec, shape, strict=False):
        kept: list[str] = []
        for axis in _axes(entry):
            if size % mesh.shape[axis] == 0:
                kept.append(axis)
                size //= mesh.shape[axis]
        entries.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    return PartitionSpec(*entries)


def param_shardings(params: PyTree, rules: Rules, mesh: Mesh) -> PyTree:
    """Gives every parameter its sharding.

    The first rule whose pattern is found in the "/"-joined path of a leaf ("layers/mlp/kernel")
    decides; a leaf without a rule is replicated. An axis that does not divide its dimension is
    dropped there: the dimension stays whole on every device of that axis.

    Args:
      params: tree of arrays or ``jax.ShapeDtypeStruct``s.
      rules: pairs of a regular expression and a ``PartitionSpec`` with at most as many entries as
        the leaf has dimensions (stacked layers have one more, the first).
      mesh: the mesh.

    Returns:
      The same tree with a ``NamedSharding`` for every leaf.

    Raises:
      ValueError: for a bad pattern, an axis that the mesh lacks, or more entries than dimensions.
    """
    _check_rules(rules, mesh)

    def sharding(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                if len(spec) > len(leaf.shape):
                    raise ValueError(
                        f"rule {pattern!r} has {len(spec)} entries, but parameter {name!r} has "
                        f"shape {tuple(leaf.shape)}; give at most {len(leaf.shape)} entries"
                    )
                return NamedSharding(mesh, _fit(spec, leaf.shape, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, params)


def state_shardings(
    abstract_state: TrainState, optimizer: optax.GradientTransformation, rules: Rules, mesh: Mesh
) -> TrainState:
    """Gives every leaf of a training state its sharding.

    Copies of the parameters in the optimizer's state (moments, accumulated gradients) are sharded
    like the parameters. Everything else, factored moments too, is replicated.

    Args:
      abstract_state: the state or its shapes (``jax.eval_shape``).
      optimizer: the optimizer that made ``abstract_state.opt_state``.
      rules: see ``param_shardings``.
      mesh: the mesh.

    Returns:
      The state's tree with a ``NamedSharding`` for every leaf.

    Raises:
      ValueError: see ``param_shardings``.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(abstract_state.params, rules, mesh)

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    def like_param(leaf, param, sharding):
        return leaf if is_masked(leaf) else sharding if leaf.shape == param.shape else replicated

    opt_state = optax.tree.map_params(
        optimizer,
        like_param,
        abstract_state.opt_state,
        abstract_state.params,
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=is_masked,
    )
    return TrainState(replicated, params, opt_state, replicated)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over "data", whole rows on every device."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Moves the rows of this process to its devices.

    Args:
      batch: tree of numpy arrays, the rows of this process, first axis = rows.
      mesh: the mesh.

    Returns:
      The tree of global arrays, sharded by ``batch_sharding``; they hold the rows of all processes.

    Raises:
      ValueError: if a leaf has no rows or its rows cannot be spread evenly over "data".
    """
    sharding = batch_sharding(mesh)
    shards = mesh.local_mesh.shape["data"]

    def put(path, leaf):
        leaf = np.asarray(leaf)
        if leaf.ndim == 0 or leaf.shape[0] % shards:
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(path)} has shape {leaf.shape}; this process "
                f"spreads its rows over {shards} shards of the mesh axis 'data', so their number "
                f"has to be a multiple of {shards}"
            )
        return jax.make_array_from_process_local_data(sharding, leaf)

    return jax.tree_util.tree_map_with_path(put, batch)


def init_sharded(
    init_fn: Callable[[PRNGKeyArray], TrainState],
    key: PRNGKeyArray,
    optimizer: optax.GradientTransformation,
    rules: Rules,
    mesh: Mesh,
) -> tuple[TrainState, TrainState]:
    """Initialises a state in place, so that no device or host ever holds the whole of it.

    Args:
      init_fn: ``key -> state``; has to work under ``jax.jit``.
      key: PRNG key, the same on every process.
      optimizer: the optimizer that ``init_fn`` uses.
      rules: see ``param_shardings``.
      mesh: the mesh.

    Returns:
      The sharded state, with the values that ``init_fn(key)`` has, and its shardings.
    """
    shardings = state_shardings(jax.eval_shape(init_fn, key), optimizer, rules, mesh)
    return jax.jit(init_fn, out_shardings=shardings)(key), shardings


def jit_step(
    step: Callable[[TrainState, PyTree], tuple[TrainState, PyTree]],
    mesh: Mesh,
    shardings: TrainState,
) -> jax.stages.Wrapped:
    """Jits a training step on a mesh.

    The state is donated: its buffers are reused for the new state, so that only the state that a
    step returned can be used after it.

    Args:
      step: ``(state, batch) -> (state, metrics)``.
      mesh: the mesh.
      shardings: shardings of the state, see ``state_shardings``.

    Returns:
      The jitted step: state sharded as given, batch over "data", metrics replicated.
    """
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )


def bytes_per_device(tree: PyTree, shardings: PyTree) -> int:
    """Returns the bytes that a tree of arrays or shapes takes on each device."""
    sizes = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        tree,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of temporaries on each device, as the compiler plans them.

    The plan is for the platform that was compiled for; a CPU's says little about a GPU or TPU.

    Raises:
      RuntimeError: if the back end does not report its memory plan.
    """
    plan = compiled.memory_analysis()
    if plan is None:
        raise RuntimeError("this back end does not report memory plans; compile for another one")
    return int(plan.temp_size_in_bytes)


def memory_report(
    compiled: jax.stages.Compiled, abstract_state: TrainState, shardings: TrainState
) -> dict[str, int]:
    """Counts the memory that a compiled step needs on each device.

    Args:
      compiled: a compiled step, ``jit_step(...).lower(...).compile()``.
      abstract_state: the state or its shapes.
      shardings: shardings of the state.

    Returns:
      Bytes per device: "params", "optimizer_state", and "temporaries" (`temporary_bytes`).

    Raises:
      RuntimeError: if the back end does not report its memory plan.
    """
    return {
        "params": bytes_per_device(abstract_state.params, shardings.params),
        "optimizer_state": bytes_per_device(abstract_state.opt_state, shardings.opt_state),
        "temporaries": temporary_bytes(compiled),
    }


def initialize_distributed(
    coordinator_address: str, num_processes: int, process_id: int, timeout_s: float = 60.0
) -> None:
    """Joins the processes of a run; has to come before anything else touches a device.

    jax ends the process from C++ when a peer is missing or the port is taken. The processes
    therefore first meet on a plain socket at the same address, and jax starts when all are there.

    Args:
      coordinator_address: "host:port" of process 0, reachable from every process.
      num_processes: number of processes, >= 1.
      process_id: number of this process, in [0, num_processes).
      timeout_s: seconds to wait for the others, > 0.

    Raises:
      ValueError: for a malformed address, or numbers out of range.
      RuntimeError: if the port is taken, the coordinator or a peer does not come in time, two
        processes have the same number or disagree on how many they are, or jax was started already.
    """
    host, colon, port = coordinator_address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"coordinator address {coordinator_address!r}; expected host:port, like 10.0.0.1:1234"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id={process_id} with num_processes={num_processes}; "
            "expected 0 <= process_id < num_processes"
        )
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s}; expected a number of seconds above 0")
    if jax.distributed.is_initialized():
        raise RuntimeError("the processes of this run are joined already; join them only once")
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        _await_peers(int(port), num_processes, deadline)
    else:
        _await_coordinator(host.strip("[]"), int(port), num_processes, process_id, deadline)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=math.ceil(timeout_s),
        )
    except Exception as error:
        raise RuntimeError(
            f"process {process_id} of {num_processes} could not start jax at "
            f"{coordinator_address}: {str(error).splitlines()[0]}"
        ) from error


# The rendezvous. A peer connects and sends one line, {"run": "icmljax", "num_processes": n,
# "process_id": i}; process 0 answers one line when all are there, or when it gives up:
# {"error": null or a sentence}. Anything else at the port belongs to somebody else.


def _listen(port: int) -> socket.socket:
    """Takes the port on all addresses, as jax will; without SO_REUSEPORT a busy port shows."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> dict:
    """Reads one line of JSON; OSError or ValueError if the other side does not speak like us."""
    connection.settimeout(max(timeout_s, 0.01))
    with connection.makefile("rb") as lines:
        message = json.loads(lines.readline(1000))
    return message if isinstance(message, dict) else {}


def _has_hung_up(connection: socket.socket) -> bool:
    """A peer says nothing while it waits: a readable connection is one that was closed."""
    return bool(select.select([connection], [], [], 0)[0])


def _await_peers(port: int, num_processes: int, deadline: float) -> None:
    """Process 0: collects all peers, then lets everybody go."""
    try:
        server = _listen(port)
    except OSError as error:
        raise RuntimeError(
            f"process 0 cannot listen on port {port} ({error.strerror or error}): end the process "
            "that uses it, or give all processes another coordinator address"
        ) from error
    peers: dict[int, socket.socket] = {}
    problem = None
    with server:
        while problem is None:
            for process_id in [i for i, peer in peers.items() if _has_hung_up(peer)]:
                peers.pop(process_id).close()
            if len(peers) == num_processes - 1:
                break
            server.settimeout(min(1.0, max(deadline - time.monotonic(), 0.01)))
            try:
                connection, _ = server.accept()
                problem = _admit(connection, peers, num_processes)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    missing = sorted(set(range(1, num_processes)) - peers.keys())
                    problem = (
                        f"of {num_processes} processes these did not report to process 0 on port "
                        f"{port} in time: {', '.join(map(str, missing))}; start all of them with "
                        "the same coordinator address"
                    )
    for peer in peers.values():
        with peer:
            try:
                _send(peer, {"error": problem})
            except OSError:
                pass  # it is gone; nobody is left to tell
    if problem is not None:
        raise RuntimeError(problem)


def _admit(
    connection: socket.socket, peers: dict[int, socket.socket], num_processes: int
) -> str | None:
    """Takes in one connection; returns what is wrong with the run, if anything."""
    try:
        message = _receive(connection, timeout_s=5.0)
    except (OSError, ValueError):
        message = {}
    if message.get("run") != "icmljax":
        connection.close()
        return None
    process_id = message["process_id"]
    problem = None
    if message["num_processes"] != num_processes:
        problem = (
            f"process {process_id} was started for {message['num_processes']} processes, process 0 "
            f"for {num_processes}; give all the same number"
        )
    elif process_id in peers and not _has_hung_up(peers[process_id]):
        problem = f"two processes have process_id={process_id}; give each its own number"
    if problem is not None:
        with connection:
            _send(connection, {"error": problem})
        return problem
    if process_id in peers:  # it was restarted
        peers[process_id].close()
    peers[process_id] = connection
    return None


def _await_coordinator(
    host: str, port: int, num_processes: int, process_id: int, deadline: float
) -> None:
    """Any other process: reports to process 0 and waits for its word."""
    reason = "no time left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                _send(
                    connection,
                    {"run": "icmljax", "num_processes": num_processes, "process_id": process_id},
                )
                problem = _receive(connection, deadline - time.monotonic())["error"]
        except (OSError, ValueError, KeyError) as error:
            reason = str(error)  # not started yet, ended, or somebody else's port: try again
            time.sleep(0.1)
            continue
        if problem is not None:
            raise RuntimeError(problem)
        return
    raise RuntimeError(
        f"process {process_id} of {num_processes} did not get an answer from process 0 at "
        f"{host}:{port} in time ({reason}): start process 0 and all others, or correct the address"
    )
