"""Hugging Face folders, `config.json` and safetensors, of Llama, Mixtral and InternLM2.

A safetensors file is 8 bytes with the length of its header, a JSON header that gives dtype, shape
and place of every tensor, and the tensors. It is read and written here, tensor by tensor: numpy has
no bfloat16, and a folder may be larger than the memory.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BLOCK, quantize
from icmljax.language.llama import LlamaConfig
from icmljax.language.weights import assembly
from icmljax.language.weights.assembly import Blocks, Part, shortened

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16)}

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "InternLM2ForCausalLM": "internlm2",
}
_LLAMA_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers/attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "layers/query": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers/key": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers/value": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers/output": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers/up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers/down": "model.layers.{layer}.mlp.down_proj.weight",
}
_MIXTRAL_NAMES = {
    **_LLAMA_NAMES,
    "layers/router": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "layers/gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "layers/up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "layers/down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
_INTERNLM2_NAMES = {
    "embedding": "model.tok_embeddings.weight",
    "final_norm": "model.norm.weight",
    "head": "output.weight",
    "layers/attention_norm": "model.layers.{layer}.attention_norm.weight",
    "layers/query": "model.layers.{layer}.attention.wqkv.weight",
    "layers/key": "model.layers.{layer}.attention.wqkv.weight",
    "layers/value": "model.layers.{layer}.attention.wqkv.weight",
    "layers/output": "model.layers.{layer}.attention.wo.weight",
    "layers/mlp_norm": "model.layers.{layer}.ffn_norm.weight",
    "layers/gate": "model.layers.{layer}.feed_forward.w1.weight",
    "layers/up": "model.layers.{layer}.feed_forward.w3.weight",
    "layers/down": "model.layers.{layer}.feed_forward.w2.weight",
}
_NAMES = {"llama": _LLAMA_NAMES, "mixtral": _MIXTRAL_NAMES, "internlm2": _INTERNLM2_NAMES}
# Where config.json does not say it.
_DEFAULT_THETA = {"llama": 10_000.0, "mixtral": 1_000_000.0, "internlm2": 10_000.0}


class _Tensor(NamedTuple):
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def rows(self) -> np.ndarray:
        # Not mapped: pages of a mapped file count as memory of the process as long as it lasts.
        rows = np.fromfile(self.path, self.dtype, math.prod(self.shape), offset=self.start)
        return rows.reshape(self.shape)


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Returns the sizes of a decoder from the entries of its `config.json`.

    Dynamic scaling of rotary positions changes nothing up to `max_length`, and is taken for none.

    Args:
      config: of LlamaForCausalLM (Llama, SmolLM, TinyLlama), MixtralForCausalLM or
        InternLM2ForCausalLM.

    Raises:
      ValueError: another architecture, or an entry that is missing, wrong or not supported.
    """
    family = _family(config)
    for key in ("attention_bias", "mlp_bias", "bias"):
        if config.get(key):
            raise ValueError(f"{key} is true; supported: matrices without biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {shortened(config['hidden_act'])}; supported: silu")
    if config.get("quantization_config") is not None:
        raise ValueError("quantization_config is there; supported: weights in F32, F16 or BF16")
    tie_embeddings = config.get("tie_word_embeddings", False)
    if not isinstance(tie_embeddings, bool):
        raise ValueError(
            f"tie_word_embeddings is {shortened(tie_embeddings)}; expected a truth value"
        )
    max_length = assembly.integer(config, "max_position_embeddings")
    window = assembly.integer(config, "sliding_window", max_length)
    if window < max_length:
        raise ValueError(
            f"sliding_window is {window}, below max_position_embeddings={max_length}; supported:"
            " attention to all earlier tokens"
        )
    d_model = assembly.integer(config, "hidden_size")
    num_heads = assembly.integer(config, "num_attention_heads")
    experts = family == "mixtral"
    return LlamaConfig(
        vocab_size=assembly.integer(config, "vocab_size"),
        d_model=d_model,
        num_layers=assembly.integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=assembly.integer(config, "num_key_value_heads", num_heads),
        head_dim=assembly.integer(config, "head_dim", max(d_model // num_heads, 1)),
        d_ff=assembly.integer(config, "intermediate_size"),
        max_length=max_length,
        rope=_rope(config, _DEFAULT_THETA[family]),
        norm_eps=assembly.positive(config, "rms_norm_eps"),
        tie_embeddings=tie_embeddings,
        num_experts=assembly.integer(config, "num_local_experts") if experts else 0,
        experts_per_token=assembly.integer(config, "num_experts_per_tok") if experts else 2,
    )


def load_hf(
    folder: str | os.PathLike,
    *,
    dtype: DTypeLike = jnp.float32,
    quantize_bits: int | None = None,
    shardings: Any = None,
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads a decoder from a Hugging Face folder.

    Args:
      folder: with `config.json` and `model.safetensors`, or `model.safetensors.index.json` and the
        files that it names.
      dtype: of dense parameters; files may have F32, F16 and BF16.
      quantize_bits: 4 or 8 rounds matrices as `quantize_params` does, layer by layer while they
        are read; None leaves them dense.
      shardings: a mesh, where parameters follow `llama.sharding_rules`; or a tree with a sharding
        for every array; None: the default device. Parameters pass through host memory one at a
        time.

    Returns:
      The configuration and the parameters of `icmljax.language.llama`, layers stacked.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or of a model that is not supported.
    """
    dtype = assembly.checked_dtype(dtype)
    if quantize_bits not in (None, 4, 8):
        raise ValueError(f"quantize_bits={quantize_bits}; expected 4, 8 or None")
    root = Path(folder)
    what = "a folder with config.json and safetensors files; get the model first"
    values = assembly.read_json(root / _CONFIG, what)
    try:
        config, family = config_from_hf(values), _family(values)
    except ValueError as error:
        raise ValueError(f"{root / _CONFIG}: {error}") from error
    tensors, source = _open_folder(root)
    assembly.check_count(source, config, len(tensors), fused=False)
    plan = _plan(config, family)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assembly.check_tensors(source, shapes, plan, ignored=_unused(config, family, tensors, source))
    blocks = {} if quantize_bits is None else _rounded(config, quantize_bits)

    def read(part: Part, blocks: Blocks | None) -> tuple[np.ndarray, ...]:
        rows = part.pick(tensors[part.tensor].rows())
        if blocks is None:
            return (rows,)
        # Rounded in the dtype in which it would be held, so that quantize_params gives the same.
        weight = quantize(jnp.asarray(rows.astype(dtype)).T, blocks.bits)
        arrays = (weight.values, weight.scale, weight.offset)
        return tuple(np.asarray(array) for array in arrays if array is not None)

    return config, assembly.assemble(source, config, plan, read, dtype, blocks, shardings)


def save_hf(
    folder: str | os.PathLike,
    config: LlamaConfig,
    params: Mapping[str, Any],
    *,
    max_shard_bytes: float = 5e9,
) -> None:
    """Writes a decoder as a Hugging Face folder, of Llama or, with experts, of Mixtral.

    Queries and keys in the order of interleaved rotary positions are put in half order, the only
    one there.

    Args:
      folder: made when missing; must not hold a model already.
      config: sizes.
      params: dense, in float32, float16 or bfloat16, layers stacked.
      max_shard_bytes: several files and an index are written where the tensors need more.

    Raises:
      ValueError: the folder holds a model, or a leaf is missing, unknown, of another shape or
        dtype, or not dense.
    """
    root = Path(folder)
    if (root / _CONFIG).exists() or any(root.glob("*.safetensors*")):
        raise ValueError(f"{root} holds a model already; choose another folder")
    if not max_shard_bytes > 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}; expected a number above 0")
    leaves = assembly.checked_leaves(config, params, blocks=False)
    for path, leaf in leaves.items():
        if np.dtype(leaf.dtype) not in _DTYPES.values():
            known = ", ".join(map(str, _DTYPES.values()))
            raise ValueError(f"leaf {path} is {leaf.dtype}; expected one of {known}")
    root.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, tuple[str, Part]]] = [{}]
    used = total = 0
    for path, parts in _plan(config, "mixtral" if config.num_experts else "llama").items():
        for part in parts:
            num_bytes = math.prod(part.shape) * leaves[path].dtype.itemsize
            if shards[-1] and used + num_bytes > max_shard_bytes:
                shards.append({})
                used = 0
            shards[-1][part.tensor] = path, part
            used, total = used + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else _SINGLE
        weight_map |= dict.fromkeys(shard, name)
        _write(root / name, config, leaves, shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / _INDEX).write_text(json.dumps(index, indent=2))
    (root / _CONFIG).write_text(json.dumps(_hf_config(config, leaves), indent=2))


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if architectures is None:
        known = {family: family for family in _NAMES}
        got, where = config.get("model_type"), "model_type"
    else:
        known = _FAMILIES
        got, where = architectures, "architectures"
        if isinstance(got, list) and len(got) == 1:
            got = got[0]
    if not isinstance(got, str) or got not in known:
        raise ValueError(f"{where} is {shortened(repr(got))}; supported: {', '.join(known)}")
    return known[got]


def _rope(config: Mapping[str, Any], default_theta: float) -> Rope:
    """Rotary positions; newer files have all of it in rope_parameters."""
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        entry = config.get(key)
        if entry is not None and not isinstance(entry, dict):
            raise ValueError(f"{key} is {shortened(repr(entry))}; expected an object or null")
        scaling |= entry or {}
    nested = [key for key, value in scaling.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rotary positions differ by {shortened(nested)}; supported: one for all")
    theta = assembly.positive({**config, **scaling}, "rope_theta", default_theta)
    if {**config, **scaling}.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor is not 1; supported: all channels turn")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "dynamic"):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, scaling=RopeScaling("linear", assembly.positive(scaling, "factor")))
    if kind != "llama3":
        raise ValueError(
            f"the type of rope_scaling is {shortened(repr(kind))}; supported: default, linear,"
            " llama3, dynamic"
        )
    llama3 = RopeScaling(
        "llama3",
        assembly.positive(scaling, "factor"),
        assembly.positive(scaling, "low_freq_factor"),
        assembly.positive(scaling, "high_freq_factor"),
        assembly.integer(scaling, "original_max_position_embeddings"),
    )
    return Rope(theta, scaling=llama3)


def _plan(config: LlamaConfig, family: str) -> dict[str, list[Part]]:
    names = _NAMES[family]
    plan = {
        path: assembly.make_parts(config, path, names[path])
        for path in assembly.leaf_shapes(config)
    }
    if family == "internlm2":
        # One matrix: for every key head the queries that use it, the key, the value.
        group = config.num_heads // config.num_kv_heads
        shape = (config.num_kv_heads * (group + 2) * config.head_dim, config.d_model)
        slices = {
            "query": slice(0, group),
            "key": slice(group, group + 1),
            "value": slice(-1, None),
        }
        for name, heads in slices.items():
            path = f"layers/{name}"
            pick = _fused_rows(config, group + 2, heads)
            plan[path] = assembly.make_parts(config, path, names[path], pick, shape)
    return plan


def _fused_rows(
    config: LlamaConfig, group: int, heads: slice
) -> Callable[[np.ndarray], np.ndarray]:
    def pick(rows: np.ndarray) -> np.ndarray:
        by_head = rows.reshape(config.num_kv_heads, group, config.head_dim, config.d_model)
        return by_head[:, heads].reshape(-1, config.d_model)

    return pick


def _unused(
    config: LlamaConfig, family: str, tensors: Mapping[str, _Tensor], source: Path
) -> list[str]:
    """Tensors that say nothing new: old files' rotary frequencies, a copy of the tied embedding."""
    names = [name for name in tensors if name.endswith(".rotary_emb.inv_freq")]
    head = tensors.get(_NAMES[family]["head"])
    embedding = tensors.get(_NAMES[family]["embedding"])
    if config.tie_embeddings and head is not None and embedding is not None:
        if head.shape != embedding.shape or not np.array_equal(head.rows(), embedding.rows()):
            raise ValueError(
                f"{source}: tensor {_NAMES[family]['head']} differs from the embedding, but"
                " tie_word_embeddings is true; correct config.json"
            )
        names.append(_NAMES[family]["head"])
    return names


def _rounded(config: LlamaConfig, bits: int) -> dict[str, Blocks]:
    """The leaves that `quantize_params` rounds."""
    blocks = {}
    for path in assembly.leaf_shapes(config):
        inputs = {
            "layers/output": config.num_heads * config.head_dim,
            "layers/down": config.d_ff,
        }.get(path, config.d_model)
        if assembly.is_matrix(path) and inputs % BLOCK == 0:
            wanted = bits if path.startswith("layers/") else 8
            blocks[path] = Blocks(wanted, offset=wanted == 4)
    return blocks


def _open_folder(root: Path) -> tuple[dict[str, _Tensor], Path]:
    """The tensors of all files, and the file to name in errors."""
    if (root / _SINGLE).is_file():
        return _open_file(root / _SINGLE), root / _SINGLE
    index = root / _INDEX
    if not index.is_file():
        raise FileNotFoundError(
            f"{root} has neither {_SINGLE} nor {_INDEX}; the model is incomplete"
        )
    weight_map = assembly.read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is no object with file names; get the file again")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name == Path(name).name and not set(name) & set("\\\0")
        if not plain or not name.endswith(".safetensors") or len(name.encode()) > 255:
            raise ValueError(
                f"{index}: tensor {shortened(tensor)} is in {shortened(repr(name))}; expected the"
                " name of a .safetensors file in the same folder"
            )
    tensors: dict[str, _Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (root / name).is_file():
            raise FileNotFoundError(
                f"{index} names {shortened(name)}, which is missing; the model is incomplete"
            )
        found = _open_file(root / name)
        listed = {tensor for tensor, place in weight_map.items() if place == name}
        if listed != set(found):
            lacking, extra = sorted(listed - set(found)), sorted(set(found) - listed)
            problems = (
                assembly.listed("missing", lacking),
                assembly.listed("not in the index", extra),
            )
            raise ValueError(
                f"{root / name} does not hold what {index.name} says:"
                f" {'; '.join(filter(None, problems))}; get both from the same place"
            )
        tensors |= found
    return tensors, index


def _open_file(path: Path) -> dict[str, _Tensor]:
    size = path.stat().st_size
    if size < 10:
        raise ValueError(f"{path} has {size} bytes, too few for a safetensors file; get it again")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path} says its header has {length} bytes, but the file has {size}; it is"
                " damaged, or no safetensors file"
            )
        header = assembly.parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    tensors = {
        name: _tensor(path, shortened(name), entry, size - 8 - length, 8 + length)
        for name, entry in header.items()
    }
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != end:
            raise ValueError(
                f"{path}: tensor {shortened(name)} starts at byte {tensor.start}, expected {end},"
                " the end of the tensor before; the file is damaged"
            )
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != size:
        raise ValueError(f"{path} has {size} bytes, but its tensors end at {end}; get it again")
    return tensors


def _tensor(path: Path, name: str, entry: Any, num_bytes: int, offset: int) -> _Tensor:
    """Checks an entry of a header."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {name} has dtype {shortened(kind)}; supported: {', '.join(_DTYPES)}"
        )
    for what, numbers in (("shape", shape), ("data_offsets", place)):
        if not isinstance(numbers, list) or any(
            type(n) is not int or not 0 <= n < 2**63 for n in numbers
        ):
            raise ValueError(
                f"{path}: tensor {name} has {what} {shortened(numbers)}; expected a list of"
                " integers in 0 .. 2^63 - 1"
            )
    expected = math.prod(shape[:8]) * _DTYPES[kind].itemsize
    if (
        not 1 <= len(shape) <= 8
        or len(place) != 2
        or place[1] > num_bytes
        or place[1] - place[0] != expected
    ):
        raise ValueError(
            f"{path}: tensor {name} of dtype {kind} and shape {shortened(shape)} lies in bytes"
            f" {shortened(place)} of {num_bytes}; expected {shortened(expected)} bytes. The file is"
            " damaged"
        )
    return _Tensor(path, _DTYPES[kind], tuple(shape), offset + place[0])


def _write(
    path: Path,
    config: LlamaConfig,
    leaves: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Part]],
) -> None:
    """Writes a file of tensors, one at a time; of each it gets the leaf and the part of it."""
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (leaf, part) in tensors.items():
        dtype = np.dtype(leaves[leaf].dtype)
        start, end = end, end + math.prod(part.shape) * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": part.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for leaf, part in tensors.values():
            file.write(_stored(config, leaves, leaf, part).tobytes())
    unfinished.rename(path)


def _stored(config: LlamaConfig, leaves: Mapping[str, Any], path: str, part: Part) -> np.ndarray:
    """A tensor as files keep it, `[out, in]`."""
    array = np.asarray(leaves[path][part.position])
    if path in ("embedding", "head") or path.endswith("norm"):
        return array
    rows = array.reshape(part.shape[::-1]).T
    if config.rope.interleaved and path in ("layers/query", "layers/key"):
        pairs = rows.reshape(-1, config.head_dim // 2, 2, config.d_model)
        rows = pairs.swapaxes(1, 2).reshape(rows.shape)
    return rows


def _hf_config(config: LlamaConfig, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of config.json."""
    scaling = config.rope.scaling
    entries: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if config.num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if config.num_experts else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(leaves["embedding"].dtype),
    }
    if config.num_experts:
        entries["num_local_experts"] = config.num_experts
        entries["num_experts_per_tok"] = config.experts_per_token
        entries["sliding_window"] = None
    if scaling is not None:
        entries["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            entries["rope_scaling"] |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
    return entries
