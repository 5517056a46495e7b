"""Small files of weights for the tests, written without the code under test, and what is in them.

The tensors of a model are a dict of float32 arrays under Hugging Face's names, as files keep them,
`[out, in]`. From it come files in every format, and by `expected_params` the tree of parameters.
"""

import contextlib
import json
import os
import pathlib
import resource
import signal
import struct
import traceback

import gguf
import jax
import jax.numpy as jnp
import numpy as np

import icmljax
from icmljax.language.attention import Rope
from icmljax.language.linear import BlockQuantized
from icmljax.language.llama import LlamaConfig

PACKAGE = str(pathlib.Path(icmljax.__file__).parent)

# Heads are wider than the model together, and no two axes are equal, so that nothing passes that
# is transposed; 32 divides all inputs of matrices.
SMALL = LlamaConfig(
    vocab_size=70,
    d_model=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    d_ff=160,
    max_length=40,
    rope=Rope(theta=5000.0),
    norm_eps=2.0**-17,  # the same in float32, which GGUF has
)
EXPERTS = LlamaConfig(
    vocab_size=70,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=96,
    max_length=40,
    rope=Rope(theta=1e6),
    norm_eps=2.0**-17,
    num_experts=3,
    experts_per_token=2,
)
STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16)}
_MLP = {"gate": "w1", "up": "w3", "down": "w2"}


def draw_tensors(config, seed=0):
    """Draws the tensors of a Llama or, with experts, of a Mixtral."""
    rng = np.random.default_rng(seed)
    d_model, d_ff = config.d_model, config.d_ff
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(*shape):
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def norm():
        return rng.normal(1, 0.1, d_model).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config.vocab_size, d_model)}
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."
        tensors |= {
            f"{start}input_layernorm.weight": norm(),
            f"{start}self_attn.q_proj.weight": matrix(query, d_model),
            f"{start}self_attn.k_proj.weight": matrix(keys, d_model),
            f"{start}self_attn.v_proj.weight": matrix(keys, d_model),
            f"{start}self_attn.o_proj.weight": matrix(d_model, query),
            f"{start}post_attention_layernorm.weight": norm(),
        }
        if config.num_experts:
            tensors[f"{start}block_sparse_moe.gate.weight"] = matrix(config.num_experts, d_model)
        for name in mlp_names(config, layer):
            down = name.endswith(("down_proj.weight", "w2.weight"))
            tensors[name] = matrix(d_model, d_ff) if down else matrix(d_ff, d_model)
    tensors["model.norm.weight"] = norm()
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, d_model)
    return tensors


def mlp_names(config, layer):
    """The names of a layer's MLPs."""
    start = f"model.layers.{layer}."
    if not config.num_experts:
        return [f"{start}mlp.{name}_proj.weight" for name in _MLP]
    return [
        f"{start}block_sparse_moe.experts.{expert}.{name}.weight"
        for expert in range(config.num_experts)
        for name in _MLP.values()
    ]


def expected_params(config, tensors):
    """The tree of parameters, of numpy arrays in the dtype of the tensors."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

    def stacked(suffix, change=lambda rows: rows):
        return np.stack(
            [
                change(tensors[f"model.layers.{layer}.{suffix}.weight"])
                for layer in range(config.num_layers)
            ]
        )

    def by_head(number):
        return lambda rows: np.moveaxis(rows.reshape(number, head_dim, -1), -1, 0)

    def mlp(name):
        if not config.num_experts:
            return stacked(f"mlp.{name}_proj", np.transpose)
        suffix = "block_sparse_moe.experts.{}." + _MLP[name]
        each = [stacked(suffix.format(i), np.transpose) for i in range(config.num_experts)]
        return np.stack(each, axis=1)

    layers = {
        "attention_norm": stacked("input_layernorm"),
        "query": stacked("self_attn.q_proj", by_head(heads)),
        "key": stacked("self_attn.k_proj", by_head(kv_heads)),
        "value": stacked("self_attn.v_proj", by_head(kv_heads)),
        "output": stacked("self_attn.o_proj", lambda rows: rows.T.reshape(heads, head_dim, -1)),
        "mlp_norm": stacked("post_attention_layernorm"),
        "gate": mlp("gate"),
        "up": mlp("up"),
        "down": mlp("down"),
    }
    if config.num_experts:
        layers["router"] = stacked("block_sparse_moe.gate", np.transpose)
    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers": layers,
        "final_norm": tensors["model.norm.weight"],
    }
    return params if config.tie_embeddings else {**params, "head": tensors["lm_head.weight"]}


def assert_same(params, expected):
    """Two trees of parameters are equal to the bit; blocks of integers are made dense first."""
    params = jax.tree.map(
        lambda leaf: leaf.dense() if isinstance(leaf, BlockQuantized) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, BlockQuantized),
    )
    # A table [V, D] in blocks is the transpose of a map from D to V.
    for name in ("embedding", "head"):
        if name in params and params[name].shape != expected[name].shape:
            params = {**params, name: params[name].T}
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for (path, leaf), wanted in zip(
        jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(expected), strict=True
    ):
        assert leaf.dtype == wanted.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted), str(path))


def interleaved_order(rows, head_dim):
    """Rows of queries or keys, in half order before, in the order of GGUF's interleaved pairs."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def gguf_tensors(config, tensors):
    """The tensors under the names and in the order of channels of GGUF."""
    result = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if not config.tie_embeddings:
        result["output.weight"] = tensors["lm_head.weight"]
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    if config.num_experts:
        names["ffn_gate_inp"] = "block_sparse_moe.gate"
    else:
        names |= {f"ffn_{name}": f"mlp.{name}_proj" for name in _MLP}
    for layer in range(config.num_layers):
        for ours, theirs in names.items():
            rows = tensors[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                rows = interleaved_order(rows, config.head_dim)
            result[f"blk.{layer}.{ours}.weight"] = rows
        for name, number in _MLP.items() if config.num_experts else ():
            start = f"model.layers.{layer}.block_sparse_moe.experts."
            result[f"blk.{layer}.ffn_{name}_exps.weight"] = np.stack(
                [tensors[f"{start}{i}.{number}.weight"] for i in range(config.num_experts)]
            )
    return result


def gguf_metadata(config):
    """The entries of the architecture, without those of the tokenizer."""
    metadata = {
        "general.architecture": "llama",
        "general.name": "small",
        "llama.block_count": np.uint32(config.num_layers),
        "llama.context_length": np.uint32(config.max_length),
        "llama.embedding_length": np.uint32(config.d_model),
        "llama.feed_forward_length": np.uint32(config.d_ff),
        "llama.attention.head_count": np.uint32(config.num_heads),
        "llama.attention.head_count_kv": np.uint32(config.num_kv_heads),
        "llama.attention.key_length": np.uint32(config.head_dim),
        "llama.attention.value_length": np.uint32(config.head_dim),
        "llama.attention.layer_norm_rms_epsilon": np.float32(config.norm_eps),
        "llama.rope.dimension_count": np.uint32(config.head_dim),
        "llama.rope.freq_base": np.float32(config.rope.theta),
        "llama.vocab_size": np.uint32(config.vocab_size),
    }
    if config.num_experts:
        metadata["llama.expert_count"] = np.uint32(config.num_experts)
        metadata["llama.expert_used_count"] = np.uint32(config.experts_per_token)
    return metadata


_GGUF_TYPES = {
    np.uint32: gguf.GGUFValueType.UINT32,
    np.int32: gguf.GGUFValueType.INT32,
    np.uint64: gguf.GGUFValueType.UINT64,
    np.float32: gguf.GGUFValueType.FLOAT32,
    np.float64: gguf.GGUFValueType.FLOAT64,
    bool: gguf.GGUFValueType.BOOL,
    str: gguf.GGUFValueType.STRING,
}


def encoded(rows, kind):
    """The bytes of a tensor in a type that the package gguf can write."""
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])


def write_gguf(path, metadata, tensors, kinds):
    """Writes a file.

    Args:
      path: of the file.
      metadata: values whose Python or numpy type says how they are stored; lists are arrays.
      tensors: float32 arrays, or pairs of raw bytes (rows of uint8) and the name of their type.
      kinds: the type of matrices, or a dict with those of some tensors; all else is F32.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif key == "general.architecture":
            if value != "llama":  # the writer has added it
                writer.kv_data[0][key].value = value
        else:
            value = value if isinstance(value, str | bool) else np.asarray(value)[()]
            plain = value.item() if isinstance(value, np.generic) else value
            writer.add_key_value(key, plain, _GGUF_TYPES[type(value)])
    for name, rows in tensors.items():
        if isinstance(rows, tuple):
            raw, kind = rows
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            continue
        kind = kinds.get(name, "F32") if isinstance(kinds, dict) else kinds
        kind = "F32" if rows.ndim == 1 or "gate_inp" in name else kind
        raw_dtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, encoded(rows, kind), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_model(path, config, tensors, kinds="F32", **metadata):
    """Writes a model; `metadata` changes entries of "llama.", with __ for a dot; None drops one."""
    entries = gguf_metadata(config)
    for key, value in metadata.items():
        entries["llama." + key.replace("__", ".")] = value
    entries = {key: value for key, value in entries.items() if value is not None}
    return write_gguf(path, entries, gguf_tensors(config, tensors), kinds)


def decoded(rows, kind):
    """What a float32 array becomes in a type of GGUF, from the definition of its blocks."""
    raw = np.asarray(encoded(rows, kind))
    if kind in STORED:
        return raw.view(STORED[kind]).astype(np.float32).reshape(rows.shape)
    block_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    values = [decoded_block(block, kind) for block in raw.reshape(-1, block_bytes)]
    return np.stack(values).reshape(rows.shape)


def decoded_block(block, kind):
    """The 32 weights of a block of uint8."""
    scale = np.float32(block[:2].view("<f2")[0])
    if kind == "Q8_0":
        return scale * block[2:].view(np.int8).astype(np.float32)
    head = 4 if kind == "Q4_1" else 2
    levels = np.concatenate([block[head:] % 16, block[head:] // 16]).astype(np.float32)
    if kind == "Q4_0":
        return scale * (levels - 8)
    return scale * levels + np.float32(block[2:4].view("<f2")[0])


def decoded_tensors(tensors, kind):
    """All matrices as a type stores them; norms and routers stay float32."""
    return {
        name: rows if rows.ndim == 1 or name.endswith("moe.gate.weight") else decoded(rows, kind)
        for name, rows in tensors.items()
    }


def hf_config(config, **changes):
    """The entries of config.json."""
    entries = {
        "architectures": ["MixtralForCausalLM" if config.num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if config.num_experts else "llama",
        "hidden_act": "silu",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }
    if config.num_experts:
        entries["num_local_experts"] = config.num_experts
        entries["num_experts_per_tok"] = config.experts_per_token
    return {**entries, **changes}


def safetensors_header(tensors, kind="F32"):
    """The JSON header of a file of these tensors."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, rows in tensors.items():
        start, end = end, end + rows.size * STORED[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(rows.shape), "data_offsets": [start, end]}
    return header


def safetensors_bytes(tensors, kind="F32", header=None):
    """A file of these tensors, with another header if one is given (an object, or its text)."""
    header = safetensors_header(tensors, kind) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = b"".join(rows.astype(STORED[kind]).tobytes() for rows in tensors.values())
    return struct.pack("<Q", len(text)) + text + body


def write_hf(folder, config, tensors, kind="F32", num_files=1, **changes):
    """Writes a Hugging Face folder; `changes` are to config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    if num_files == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, kind))
        return folder
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::num_files]}
        (folder / name).write_bytes(safetensors_bytes(part, kind))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def check_refusal(error, *, names):
    """An error that was raised on purpose, in one readable line that names one of the files."""
    assert type(error) in (ValueError, FileNotFoundError), repr(error)
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].filename.startswith(PACKAGE), f"{error!r} comes from {frames[-1]}"
    message = str(error)
    assert any(str(name) in message for name in names), message
    assert 20 < len(message) < 2000 and message.isprintable(), message


@contextlib.contextmanager
def limits(*, seconds=20, num_bytes=2**31):
    """Stops what runs too long, and refuses it more memory than it had and so many bytes."""

    def stop(number, frame):
        raise AssertionError(f"it runs for more than {seconds} seconds")

    jax.devices()  # the threads of the back end need memory of their own
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        if os.path.exists("/proc/self/statm"):
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + num_bytes
            resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
