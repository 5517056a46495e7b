"""From the tensors of a file to the tree of parameters, one stacked leaf at a time."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from icmljax.language.linear import BLOCK, BlockQuantized
from icmljax.language.llama import LlamaConfig, parameter_shapes, sharding_rules
from icmljax.training import mesh as mesh_lib

_TABLES = ("embedding", "head")


class Part(NamedTuple):
    """What one tensor of a file gives to one leaf.

    Attributes:
      position: where in the stacked leaf: nothing, the layer, or layer and expert.
      tensor: its name in the file.
      shape: its shape in the file.
      pick: takes the part's rows, `[out, in]`, from the tensor.
    """

    position: tuple[int, ...]
    tensor: str
    shape: tuple[int, ...]
    pick: Callable[[np.ndarray], np.ndarray]


class Blocks(NamedTuple):
    """How a leaf is held that stays in blocks of integers: 4 or 8 bits, with an offset or not."""

    bits: int
    offset: bool


Plan = Mapping[str, Sequence[Part]]


def leaf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf by its path, such as "layers/query"."""
    shapes = parameter_shapes(config)
    layers = {f"layers/{name}": shape for name, shape in shapes.pop("layers").items()}
    return {**shapes, **layers}


def is_matrix(path: str) -> bool:
    """Whether a leaf is a matrix that may be quantised: no norm and no router."""
    return not path.endswith(("norm", "router"))


def make_parts(
    config: LlamaConfig,
    path: str,
    name: str,
    pick: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    shape: tuple[int, ...] | None = None,
) -> list[Part]:
    """Returns the parts of a leaf.

    Args:
      config: sizes.
      path: of the leaf.
      name: of its tensors, with {layer} and {expert} where they are numbered. Without {expert},
        all experts of a layer are in one tensor.
      pick: see `Part`.
      shape: of the tensors, where it is not that of the leaf's matrix.
    """
    shape = _rows_shape(config, path) if shape is None else shape
    if not path.startswith("layers/"):
        return [Part((), name, shape, pick)]
    layers = range(config.num_layers)
    if not (config.num_experts and path.endswith(("gate", "up", "down"))):
        return [Part((layer,), name.format(layer=layer), shape, pick) for layer in layers]
    indices = [(layer, expert) for layer in layers for expert in range(config.num_experts)]
    if "{expert}" in name:
        return [
            Part(index, name.format(layer=index[0], expert=index[1]), shape, pick)
            for index in indices
        ]
    return [
        Part(index, name.format(layer=index[0]), (config.num_experts, *shape), _item(index[1]))
        for index in indices
    ]


def _item(index: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: rows[index]


def check_count(source: Path, config: LlamaConfig, num_tensors: int, fused: bool) -> None:
    """Raises ValueError if the file is too small for the layers of `config`, before any loop."""
    experts = 1 if fused else max(config.num_experts, 1)
    if config.num_layers * experts > num_tensors:
        raise ValueError(
            f"{source} has {num_tensors} tensors, too few for {config.num_layers} layers"
            f"{f' of {experts} experts' if experts > 1 else ''}; the file is damaged or incomplete"
        )


def check_tensors(
    source: Path, shapes: Mapping[str, tuple[int, ...]], plan: Plan, ignored: Iterable[str] = ()
) -> None:
    """Raises ValueError unless the file has exactly the tensors of the plan, in their shapes."""
    expected = {part.tensor: part.shape for parts in plan.values() for part in parts}
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        listed("missing", [name for name in expected if name not in shapes]),
        listed("unexpected", [name for name in shapes if name not in {*expected, *ignored}]),
        listed("of another shape", wrong),
    ]
    if any(problems):
        raise ValueError(
            f"{source}: {'; '.join(filter(None, problems))}. Expected {len(expected)} tensors;"
            " the file is damaged, or is no model of the kind that its configuration says"
        )


def listed(what: str, names: Sequence[str]) -> str:
    """Returns "2 tensors are missing: a, b", with 5 names at most, or nothing for no names."""
    if not names:
        return ""
    verb = "tensor is" if len(names) == 1 else "tensors are"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {verb} {what}: {', '.join(map(shortened, names[:5]))}{more}"


def shortened(text: Any) -> str:
    """Returns text of a file for a message: printable, and not a million characters."""
    text = str(text)[:121].encode("unicode_escape").decode("ascii")
    return text if len(text) <= 120 else f"{text[:120]}..."


def assemble(
    source: Path,
    config: LlamaConfig,
    plan: Plan,
    read: Callable[[Part, Blocks | None], tuple[np.ndarray, ...]],
    dtype: DTypeLike,
    blocks: Mapping[str, Blocks],
    shardings: Any,
) -> dict[str, Any]:
    """Returns the parameters; no more than one leaf of them is in host memory at once.

    Args:
      source: named in errors.
      config: sizes.
      plan: the parts of every leaf.
      read: returns the rows `[out, in]` of a part, or values, scale and offset of their blocks.
      dtype: of dense leaves.
      blocks: the leaves that stay in blocks.
      shardings: a mesh, a tree like the parameters, or None for the default device.
    """
    shapes = leaf_shapes(config)
    names = {path: _array_names(path, blocks.get(path)) for path in shapes}
    if isinstance(shardings, Mesh):
        shardings = mesh_shardings(config, _abstract(shapes, blocks, dtype), shardings)
    place = _placement([name for group in names.values() for name in group], shardings)
    leaves = {}
    for path, shape in shapes.items():
        empty = _empty_arrays(path, shape, blocks.get(path), dtype)
        for part in plan[path]:
            rows = read(part, blocks.get(path))
            for target, array in zip(empty, rows, strict=True):
                dense = path not in blocks and path not in _TABLES and array.ndim == 2
                with np.errstate(all="ignore"):  # what is too large for dtype is found next
                    target[part.position] = _oriented(array, target[part.position].shape, dense)
                _check_finite(source, part.tensor, target[part.position])
        arrays = tuple(place(name, array) for name, array in zip(names[path], empty, strict=True))
        # The host's arrays go before the next leaf comes; they stay while they are being copied.
        del empty, target
        jax.block_until_ready(arrays)
        leaves[path] = (
            _wrap_blocks(path, shape, arrays, blocks[path]) if path in blocks else arrays[0]
        )
    return tree_of(leaves)


def tree_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of parameters from its leaves by path."""
    tree: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if "/" not in name}
    tree["layers"] = {
        name.removeprefix("layers/"): leaf for name, leaf in leaves.items() if "/" in name
    }
    return tree


def checked_leaves(config: LlamaConfig, params: Any, *, blocks: bool) -> dict[str, Any]:
    """Returns the leaves of parameters by path, or raises ValueError if they are not all there.

    Args:
      config: sizes.
      params: arrays or shapes, layers stacked.
      blocks: whether `BlockQuantized` leaves may be among them.
    """
    layers = params.get("layers")
    if not isinstance(layers, Mapping):
        raise ValueError("the parameters' layers are not stacked; expected the tree of `init`")
    given = {name: leaf for name, leaf in params.items() if name != "layers"}
    given |= {f"layers/{name}": leaf for name, leaf in layers.items()}
    shapes = leaf_shapes(config)
    problems = [
        listed("missing", [path for path in shapes if path not in given]),
        listed("unexpected", [path for path in given if path not in shapes]),
    ]
    if any(problems):
        problem = "; ".join(filter(None, problems)).replace("tensor", "leaf")
        raise ValueError(f"the parameters do not fit the configuration: {problem}")
    for path, shape in shapes.items():
        leaf = given[path]
        expected: list[Any]
        got: list[Any]
        if isinstance(leaf, BlockQuantized) and blocks and is_matrix(path):
            kind = Blocks(4 if leaf.bits == 4 else 8, leaf.offset is not None)
            expected = _block_shapes(path, shape, kind)
            got = [tuple(array.shape) for array in jax.tree.leaves(leaf)]
            fits = got == expected and (leaf.in_shape, leaf.out_shape) == _in_and_out(path, shape)
        else:
            expected, got = [shape], [getattr(leaf, "shape", type(leaf).__name__)]
            fits = got == expected and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not fits:
            raise ValueError(
                f"leaf {path} is {getattr(leaf, 'dtype', type(leaf).__name__)} {got}, expected"
                f" floating point {expected}; make it so, or change the configuration"
            )
    return {path: given[path] for path in shapes}


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises ValueError; `what` says where such files lie."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected {what}")
    return parse_json(path, path.read_bytes())


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """Returns the JSON object in `data`, or raises ValueError that names the file."""
    try:
        result = json.loads(data.decode(), object_pairs_hook=_without_repetition)
        json.dumps(result, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: no JSON in UTF-8 ({shortened(error)}); get it again"
        ) from error
    if not isinstance(result, dict):
        raise ValueError(f"{path} has a JSON {type(result).__name__}; expected an object")
    return result


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has one key twice")
    return result


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns a dtype that weights may have, or raises ValueError."""
    result = jnp.dtype(dtype)
    if not jnp.issubdtype(result, jnp.floating):
        raise ValueError(f"dtype={result}; weights need a floating point type, such as float32")
    return result


def integer(values: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Returns an entry of a configuration, or raises ValueError; null counts as absent."""
    value = _present(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{key} is {shortened(repr(value))}; expected an integer >= {least}")
    return value


def positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Returns an entry of a configuration that is a finite number above 0."""
    value = _present(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"{key} is {shortened(repr(value))}; expected a finite number above 0")
    return float(value)


def _present(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(
            f"{key} is missing; this is no configuration of a Llama, or an incomplete one"
        )
    return value


def _rows_shape(config: LlamaConfig, path: str) -> tuple[int, ...]:
    """Shape `[out, in]` of one matrix of a leaf, or `[dim]` of a norm."""
    d_model = config.d_model
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    name = path.removeprefix("layers/")
    outputs = {
        "query": query,
        "key": keys,
        "value": keys,
        "gate": config.d_ff,
        "up": config.d_ff,
        "router": config.num_experts,
        "embedding": config.vocab_size,
        "head": config.vocab_size,
    }
    if name in outputs:
        return outputs[name], d_model
    return {"output": (d_model, query), "down": (d_model, config.d_ff)}.get(name, (d_model,))


def _oriented(array: np.ndarray, shape: tuple[int, ...], dense: bool) -> np.ndarray:
    """Files keep `[out, in]`, dense leaves `[in, out]` with heads as an axis of their own."""
    return array.T.reshape(shape) if dense else array


def _check_finite(source: Path, tensor: str, array: np.ndarray) -> None:
    if array.dtype in (np.int8, np.uint8):
        return
    with np.errstate(all="ignore"):
        total = np.sum(array, dtype=np.float64)  # needs no array of flags
    if not math.isfinite(total):
        raise ValueError(
            f"{source}: tensor {tensor} has NaN or infinite values as {array.dtype}; the file is"
            " damaged, or its values need a wider dtype"
        )


def _array_names(path: str, blocks: Blocks | None) -> tuple[str, ...]:
    if blocks is None:
        return (path,)
    return tuple(f"{path}/{name}" for name in ("values", "scale", "offset")[: 2 + blocks.offset])


def _in_and_out(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of input and output of a leaf; a table [V, D] is the transpose of a map to V."""
    if path in _TABLES:
        return shape[1:], shape[:1]
    num_out = 2 if path.endswith(("query", "key", "value")) else 1
    num_in = 2 if path.endswith("output") else 1
    return shape[-num_out - num_in : -num_out], shape[-num_out:]


def _block_shapes(path: str, shape: tuple[int, ...], blocks: Blocks) -> list[tuple[int, ...]]:
    """Shapes of values, scale and offset."""
    inputs, outputs = (math.prod(axes) for axes in _in_and_out(path, shape))
    lead = shape[: len(shape) - sum(map(len, _in_and_out(path, shape)))]
    grid = (*lead, outputs, inputs // BLOCK)
    return [(*grid, BLOCK * blocks.bits // 8), *[grid] * (1 + blocks.offset)]


def _empty_arrays(
    path: str, shape: tuple[int, ...], blocks: Blocks | None, dtype: DTypeLike
) -> list[np.ndarray]:
    """Arrays of the host for a leaf."""
    if blocks is None:
        return [np.empty(shape, np.dtype(dtype))]
    values, *floats = _block_shapes(path, shape, blocks)
    integers = np.empty(values, np.uint8 if blocks.bits == 4 else np.int8)
    return [integers, *(np.empty(grid, np.float32) for grid in floats)]


def mesh_shardings(config: LlamaConfig, abstract: Any, mesh: Mesh) -> Any:
    """Returns the shardings of parameters, or of their shapes, by the rules of the backbone."""
    return mesh_lib.param_shardings(abstract, sharding_rules(config, mesh), mesh)


def _abstract(
    shapes: Mapping[str, tuple[int, ...]], blocks: Mapping[str, Blocks], dtype: DTypeLike
) -> Any:
    """The tree of parameters with shapes in place of arrays."""
    leaves: dict[str, Any] = {}
    for path, shape in shapes.items():
        if path not in blocks:
            leaves[path] = jax.ShapeDtypeStruct(shape, dtype)
            continue
        values, *floats = _block_shapes(path, shape, blocks[path])
        integers = jax.ShapeDtypeStruct(values, jnp.uint8 if blocks[path].bits == 4 else jnp.int8)
        arrays = (integers, *(jax.ShapeDtypeStruct(grid, jnp.float32) for grid in floats))
        leaves[path] = _wrap_blocks(path, shape, arrays, blocks[path])
    return tree_of(leaves)


def _wrap_blocks(
    path: str, shape: tuple[int, ...], arrays: tuple[Any, ...], blocks: Blocks
) -> BlockQuantized:
    values, scale, *offset = arrays
    in_shape, out_shape = _in_and_out(path, shape)
    return BlockQuantized(
        values, scale, offset[0] if offset else None, blocks.bits, in_shape, out_shape
    )


def _placement(names: Sequence[str], shardings: Any) -> Callable[[str, np.ndarray], jax.Array]:
    """Returns the function that moves an array of the host to its devices."""
    if shardings is None:
        return lambda name, array: jax.device_put(array)  # jnp.asarray makes one copy more
    given = matched_shardings(names, shardings)
    return lambda name, array: jax.make_array_from_callback(
        array.shape, given[name], array.__getitem__
    )


def matched_shardings(names: Sequence[str], shardings: Any) -> dict[str, Any]:
    """Returns the sharding of every array by its path, or raises ValueError."""
    given = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(shardings)[0]
    }
    if set(given) != set(names):
        lacking, extra = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(
            f"shardings do not fit the parameters: nothing for {lacking[:5]}, unknown {extra[:5]};"
            " make them with icmljax.training.mesh.param_shardings from a tree with these leaves"
        )
    return given
