"""Weights of decoders in orbax checkpoints, blocks of integers included."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BlockQuantized
from icmljax.language.llama import LlamaConfig
from icmljax.language.weights import assembly
from icmljax.training.checkpoint import Checkpoints

_CONFIG, _PARAMS = "config.json", "params"
_IDENTITY = {"kind": "icmljax.language.llama"}


def save_orbax(folder: str | os.PathLike, config: LlamaConfig, params: Mapping[str, Any]) -> None:
    """Writes parameters, dense or `BlockQuantized`, with their configuration.

    Args:
      folder: made when missing; must be new or empty.
      config: sizes.
      params: layers stacked; arrays may be sharded, over several hosts too.

    Raises:
      ValueError: the folder is not empty, or a leaf is missing, unknown or of another kind.
    """
    root = Path(folder)
    # Another process may have made the folder already; the first one looks.
    if jax.process_index() == 0 and root.exists() and not _is_empty(root):
        raise ValueError(f"{root} is there and not empty; choose a new folder")
    leaves = assembly.checked_leaves(config, params, blocks=True)
    description = {
        "config": dataclasses.asdict(config),
        "leaves": {path: _described(leaf) for path, leaf in leaves.items()},
    }
    root.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(root / _PARAMS, identity=_IDENTITY)
    checkpoints.save(0, assembly.tree_of(leaves), {})
    checkpoints.close()
    if jax.process_index() == 0:
        (root / _CONFIG).write_text(json.dumps(description, indent=2))


def load_orbax(
    folder: str | os.PathLike, *, shardings: Any = None
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads what `save_orbax` wrote.

    Args:
      folder: of the checkpoint.
      shardings: a mesh, where parameters follow `llama.sharding_rules`; or a tree with a sharding
        for every array; None: the default device. The mesh may differ from that of the save.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is damaged, or configuration and parameters do not fit; the leaf is named.
    """
    path = Path(folder) / _CONFIG
    description = assembly.read_json(path, "a folder that save_orbax wrote")
    if not (Path(folder) / _PARAMS).is_dir():
        raise FileNotFoundError(f"{Path(folder) / _PARAMS} is missing; save_orbax writes it")
    try:
        config = _config(description["config"])
        leaves = {name: _abstract(leaf) for name, leaf in description["leaves"].items()}
        checked = assembly.checked_leaves(config, assembly.tree_of(leaves), blocks=True)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged ({error}); expected what save_orbax wrote") from error
    abstract = assembly.tree_of(checked)
    if isinstance(shardings, jax.sharding.Mesh):
        shardings = assembly.mesh_shardings(config, abstract, shardings)
    abstract = _with_shardings(abstract, shardings)
    checkpoints = Checkpoints(Path(folder) / _PARAMS, identity=_IDENTITY)
    restored = checkpoints.restore(abstract)
    checkpoints.close()
    if restored is None:
        raise ValueError(f"{Path(folder) / _PARAMS} has no parameters; the save was cut off")
    return config, restored[0]


def _is_empty(root: Path) -> bool:
    return root.is_dir() and not any(root.iterdir())


def _described(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, BlockQuantized):
        arrays = {
            name: _described(getattr(leaf, name))
            for name in ("values", "scale", "offset")
            if getattr(leaf, name) is not None
        }
        return {**arrays, "bits": leaf.bits, "in": leaf.in_shape, "out": leaf.out_shape}
    return {"shape": leaf.shape, "dtype": str(leaf.dtype)}


def _abstract(described: Mapping[str, Any]) -> Any:
    if "values" not in described:
        shape = tuple(int(size) for size in described["shape"])
        return jax.ShapeDtypeStruct(shape, jnp.dtype(described["dtype"]))
    if described["bits"] not in (4, 8):
        raise ValueError(f"bits is {described['bits']!r}; blocks have 4 or 8 bits")
    offset = described.get("offset")
    return BlockQuantized(
        _abstract(described["values"]),
        _abstract(described["scale"]),
        None if offset is None else _abstract(offset),
        described["bits"],
        tuple(described["in"]),
        tuple(described["out"]),
    )


def _config(values: Mapping[str, Any]) -> LlamaConfig:
    rope = dict(values["rope"])
    if rope["scaling"] is not None:
        rope["scaling"] = RopeScaling(**rope["scaling"])
    return LlamaConfig(**{**values, "rope": Rope(**rope)})


def _with_shardings(abstract: Any, shardings: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        given: dict[str, Any] = dict.fromkeys(names, device)
    else:
        given = assembly.matched_shardings(names, shardings)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given[name])
        for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)
