"""Hugging Face folders and orbax checkpoints: read, written, sharded, rounded, damaged."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from icmljax.language import llama, weights
from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BlockQuantized
from icmljax.training import mesh as mesh_lib
from tests.language import weight_files
from tests.language.weight_files import EXPERTS, SMALL

TIED = dataclasses.replace(SMALL, tie_embeddings=True)
LINEAR = dataclasses.replace(SMALL, rope=Rope(5000.0, scaling=RopeScaling("linear", 4.0)))
LLAMA3 = dataclasses.replace(
    TIED, rope=Rope(5000.0, scaling=RopeScaling("llama3", 8.0, 1.5, 3.0, 16))
)
# Neither the input of `output`, 72, nor that of `down`, 80, is a number of whole blocks.
ODD = dataclasses.replace(SMALL, head_dim=12, d_ff=80)
CONFIGS = {"head": SMALL, "tied": TIED, "experts": EXPERTS, "linear": LINEAR, "llama3": LLAMA3}
MODELS = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 16,
    },
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY, QUERY_LEAF = "model.layers.1.self_attn.q_proj.weight", "layers/query"


def _params(config, dtype=jnp.float32, seed=0):
    expected = weight_files.expected_params(config, weight_files.draw_tensors(config, seed))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), expected)


def _logits(config, params):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    return np.asarray(llama.forward(params, config, jnp.asarray(tokens, jnp.int32)))


def _write(folder, config=SMALL, change=lambda tensors: None, kind="F32", num_files=1, **entries):
    """Writes a folder, of tensors that are changed before."""
    tensors = weight_files.draw_tensors(config)
    change(tensors)
    return weight_files.write_hf(folder, config, tensors, kind, num_files, **entries)


def _scaling(config):
    return {"rope_scaling": config.rope.scaling and SCALINGS[config.rope.scaling.kind]}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kind", DTYPES)
@MODELS
def test_reads_every_kind_of_folder(tmp_path, config, kind, num_files):
    """Files that the test has written, in all dtypes."""
    folder = _write(tmp_path / "model", config, kind=kind, num_files=num_files, **_scaling(config))
    got, params = weights.load_hf(folder)
    assert got == config
    tensors = weight_files.draw_tensors(config)
    stored = {name: rows.astype(DTYPES[kind]) for name, rows in tensors.items()}
    expected = weight_files.expected_params(config, stored)
    weight_files.assert_same(params, jax.tree.map(lambda leaf: leaf.astype(np.float32), expected))
    _, same = weights.load_hf(folder, dtype=DTYPES[kind])
    weight_files.assert_same(same, expected)


@pytest.mark.parametrize("max_shard_bytes", [5e9, 30_000], ids=["single", "sharded"])
@pytest.mark.parametrize("kind", DTYPES)
@MODELS
def test_round_trip(tmp_path, config, kind, max_shard_bytes):
    params = _params(config, DTYPES[kind])
    folder = tmp_path / "model"
    weights.save_hf(folder, config, params, max_shard_bytes=max_shard_bytes)
    assert (folder / SINGLE).exists() == (max_shard_bytes == 5e9)
    got, loaded = weights.load_hf(folder, dtype=DTYPES[kind])
    assert got == config
    weight_files.assert_same(loaded, params)
    entries = json.loads((folder / "config.json").read_text())
    assert entries["torch_dtype"] == str(np.dtype(DTYPES[kind]))
    expected = weight_files.hf_config(config, **_scaling(config))
    assert {key: entries[key] for key in expected} == expected


@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["head", "experts"])
def test_the_package_safetensors_reads_what_we_write(tmp_path, config):
    for kind, dtype in DTYPES.items():
        folder = tmp_path / kind
        weights.save_hf(folder, config, _params(config, dtype), max_shard_bytes=30_000)
        index = json.loads((folder / INDEX).read_text())
        tensors, sizes = {}, []
        for name in sorted(set(index["weight_map"].values())):
            found = safetensors.numpy.load_file(folder / name)
            assert {index["weight_map"][tensor] for tensor in found} == {name}
            sizes.append(sum(rows.nbytes for rows in found.values()))
            assert sizes[-1] <= 30_000 or len(found) == 1
            # The tensors begin where an 8-byte number may lie, as the format wants it.
            assert int.from_bytes((folder / name).read_bytes()[:8], "little") % 8 == 0
            tensors |= found
        assert len(sizes) > 2 and index["metadata"]["total_size"] == sum(sizes)
        expected = weight_files.draw_tensors(config)
        assert set(tensors) == set(expected)
        for name, rows in expected.items():
            assert tensors[name].dtype == dtype
            np.testing.assert_array_equal(tensors[name], rows.astype(dtype), name)
        assert not list(folder.glob("*.unfinished"))


@pytest.mark.parametrize("kind", DTYPES)
def test_we_read_what_the_package_safetensors_writes(tmp_path, kind):
    """The package sorts tensors by dtype and name; a file may have several dtypes."""
    folder = _write(tmp_path / "model")
    tensors = weight_files.draw_tensors(SMALL)
    stored = {name: rows.astype(DTYPES[kind]) for name, rows in tensors.items()}
    norm = "model.layers.0.input_layernorm.weight"
    stored[norm] = tensors[norm]
    safetensors.numpy.save_file(stored, folder / SINGLE, metadata={"format": "np"})
    _, params = weights.load_hf(folder)
    expected = weight_files.expected_params(SMALL, stored)
    weight_files.assert_same(params, jax.tree.map(lambda leaf: leaf.astype(np.float32), expected))


def test_interleaved_channels_are_saved_in_half_order(tmp_path):
    params = _params(SMALL)
    layers = dict(params["layers"])
    order = np.arange(SMALL.head_dim).reshape(2, -1).T.ravel()  # 0, 8, 1, 9, ...
    for name in ("query", "key"):
        layers[name] = layers[name][..., order]
    rope = dataclasses.replace(SMALL.rope, interleaved=True)
    interleaved = dataclasses.replace(SMALL, rope=rope)
    weights.save_hf(tmp_path / "model", interleaved, {**params, "layers": layers})
    config, loaded = weights.load_hf(tmp_path / "model")
    assert config == SMALL
    weight_files.assert_same(loaded, params)


def test_internlm2(tmp_path):
    """Its fused matrix, put together head by head, gives the logits of the Llama of these parts."""
    tensors = weight_files.draw_tensors(SMALL)
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    fused = {
        "model.tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    dim, queries = SMALL.head_dim, SMALL.num_heads // SMALL.num_kv_heads
    for layer in range(SMALL.num_layers):
        start = f"model.layers.{layer}."
        for llamas, theirs in names.items():
            fused[f"{start}{theirs}.weight"] = tensors[f"{start}{llamas}.weight"]
        query, key, value = (tensors[f"{start}self_attn.{n}_proj.weight"] for n in "qkv")
        pieces = []
        for head in range(SMALL.num_kv_heads):
            pieces += [
                query[dim * i : dim * (i + 1)] for i in range(queries * head, queries * (head + 1))
            ]
            pieces += [key[dim * head : dim * (head + 1)], value[dim * head : dim * (head + 1)]]
        fused[f"{start}attention.wqkv.weight"] = np.concatenate(pieces)
    changes = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    folder = weight_files.write_hf(tmp_path / "fused", SMALL, fused, num_files=2, **changes)
    config, params = weights.load_hf(folder)
    assert config == SMALL
    expected = weight_files.expected_params(SMALL, tensors)
    weight_files.assert_same(params, expected)
    wanted = _logits(SMALL, jax.tree.map(jnp.asarray, expected))
    assert np.ptp(wanted) > 1
    np.testing.assert_array_equal(_logits(config, params), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_say_nothing_new(tmp_path, tied):
    """Rotary frequencies of old files, and a second copy of the embedding."""
    config = TIED if tied else SMALL

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        if tied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    folder = _write(tmp_path / "model", config, change)
    got, params = weights.load_hf(folder)
    assert got == config
    weight_files.assert_same(params, _params(config))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": None}, (4, 4, 16)),
        ({"architectures": None, "model_type": "llama"}, (6, 2, 16)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, (6, 2, 16)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0}}, (6, 2, 16)),
        ({"sliding_window": 40}, (6, 2, 16)),
    ],
)
def test_other_ways_to_say_it(changes, expected):
    config = weights.config_from_hf(weight_files.hf_config(SMALL, **changes))
    heads, kv_heads, head_dim = expected
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    assert config == dataclasses.replace(SMALL, **sizes)


def test_default_bases_of_rotary_positions():
    for config, theta in ((SMALL, 10_000.0), (EXPERTS, 1_000_000.0)):
        entries = weight_files.hf_config(config)
        del entries["rope_theta"]
        assert weights.config_from_hf(entries).rope == Rope(theta)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("config", [SMALL, EXPERTS, ODD], ids=["head", "experts", "odd"])
def test_rounding_while_reading_is_rounding_afterwards(tmp_path, config, bits, dtype):
    folder = _write(tmp_path / "model", config)
    _, dense = weights.load_hf(folder, dtype=dtype)
    got, params = weights.load_hf(folder, dtype=dtype, quantize_bits=bits)
    assert got == config
    expected = llama.quantize_params(dense, bits)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    _assert_equal(params, expected)
    matrices = {"query", "key", "value", "output", "gate", "up", "down"}
    kept = {name for name in matrices if isinstance(params["layers"][name], BlockQuantized)}
    assert kept == (matrices - {"output", "down"} if config is ODD else matrices)
    if dtype == jnp.float32 and config is not ODD:
        np.testing.assert_array_equal(_logits(config, params), _logits(config, expected))


def _assert_equal(params, expected):
    """Two trees are equal to the bit, wherever they are; blocks are compared as dense matrices."""
    params = jax.device_put(params, jax.devices()[0])

    def check(leaf, wanted):
        assert type(leaf) is type(wanted)
        if isinstance(leaf, BlockQuantized):
            on_device = (jax.tree.map(jnp.asarray, each) for each in (leaf, wanted))
            leaf, wanted = (each.dense() for each in on_device)
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))

    jax.tree.map(check, params, expected, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))


def _rules(config, mesh, params):
    return mesh_lib.param_shardings(params, llama.sharding_rules(config, mesh), mesh)


def _check_shardings(params, shardings):
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["head", "experts"])
def test_onto_a_mesh(tmp_path, config, bits):
    mesh = mesh_lib.make_mesh("data=4,model=2")
    folder = _write(tmp_path / "model", config)
    _, expected = weights.load_hf(folder, quantize_bits=bits)
    _, params = weights.load_hf(folder, quantize_bits=bits, shardings=mesh)
    shardings = _rules(config, mesh, expected)
    _check_shardings(params, shardings)
    # Some leaf is split over all eight devices.
    parts = [leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params)]
    assert max(parts) == (8 if bits is None else 2)
    _assert_equal(params, expected)


def test_onto_the_shardings_of_a_tree(tmp_path):
    folder = _write(tmp_path / "model")
    _, expected = weights.load_hf(folder)
    devices = jax.devices()
    shardings = jax.tree.map(
        lambda leaf: jax.sharding.SingleDeviceSharding(devices[leaf.size % 7 + 1]), expected
    )
    _, params = weights.load_hf(folder, shardings=shardings)
    _check_shardings(params, shardings)
    weight_files.assert_same(params, expected)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("config", [LLAMA3, EXPERTS], ids=["llama3", "experts"])
def test_orbax(tmp_path, config, bits):
    """Saved on one device, loaded on it and onto a mesh."""
    params = _params(config)
    # A model may have norms and matrices of different types.
    params["final_norm"] = params["final_norm"].astype(jnp.bfloat16)
    params = params if bits is None else llama.quantize_params(params, bits)
    weights.save_orbax(tmp_path / "model", config, params)
    got, loaded = weights.load_orbax(tmp_path / "model")
    assert got == config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    _assert_equal(loaded, params)
    mesh = mesh_lib.make_mesh("data=4,model=2")
    got, sharded = weights.load_orbax(tmp_path / "model", shardings=mesh)
    assert got == config
    _check_shardings(sharded, _rules(config, mesh, params))
    _assert_equal(sharded, params)


def test_orbax_from_a_mesh_to_another(tmp_path):
    params = llama.quantize_params(_params(SMALL), 8)
    mesh = mesh_lib.make_mesh("data=2,model=4")
    sharded = jax.device_put(params, _rules(SMALL, mesh, params))
    weights.save_orbax(tmp_path / "model", SMALL, sharded)
    other = mesh_lib.make_mesh("data=4,model=2")
    shardings = _rules(SMALL, other, params)
    _, loaded = weights.load_orbax(tmp_path / "model", shardings=shardings)
    _check_shardings(loaded, shardings)
    _assert_equal(loaded, params)


def test_header_of_odd_length(tmp_path):
    """Tensors need not lie at a multiple of their items' size."""
    tensors = weight_files.draw_tensors(SMALL)
    folder = weight_files.write_hf(tmp_path / "model", SMALL, tensors)
    for spaces in range(4):
        header = json.dumps(weight_files.safetensors_header(tensors)).encode() + b" " * spaces
        data = weight_files.safetensors_bytes(tensors, header=header)
        (folder / SINGLE).write_bytes(data)
        expected = weight_files.expected_params(SMALL, tensors)
        weight_files.assert_same(weights.load_hf(folder)[1], expected)


def test_known_models_by_their_config():
    """Entries as in the models' own files."""
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }
    assert weights.config_from_hf(mixtral) == llama.CONFIGS["mixtral-8x7b"]
    internlm2 = {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 92544,
    }
    assert weights.config_from_hf(internlm2) == llama.CONFIGS["internlm2-7b"]


def test_sharded_parameters_are_saved_whole(tmp_path):
    params = _params(SMALL)
    mesh = mesh_lib.make_mesh("data=2,model=4")
    sharded = jax.device_put(params, _rules(SMALL, mesh, params))
    weights.save_hf(tmp_path / "model", SMALL, sharded)
    weight_files.assert_same(weights.load_hf(tmp_path / "model")[1], jax.device_get(params))


def test_gguf_to_orbax(tmp_path):
    """Blocks with an offset, from a file, are kept as they are."""
    path = weight_files.write_gguf_model(
        tmp_path / "small.gguf", SMALL, weight_files.draw_tensors(SMALL), "Q4_0"
    )
    config, params = weights.load_gguf(path, keep_quantized=True, rope_order="interleaved")
    weights.save_orbax(tmp_path / "model", config, params)
    got, again = weights.load_orbax(tmp_path / "model")
    assert got == config and jax.tree.structure(again) == jax.tree.structure(params)
    _assert_equal(again, params)


_MEASURE = """
import pathlib, sys
import jax
from icmljax.language import weights

def peak():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])

weights.load_hf(sys.argv[1])
before = peak()
config, params = weights.load_hf(sys.argv[2])
jax.block_until_ready(params)
print(before, peak())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_memory_while_reading(tmp_path):
    """The parameters, a leaf on the host and a tensor of the file: never all of the file."""
    sizes = dict(vocab_size=16_000, d_model=512, num_layers=12, num_heads=8, num_kv_heads=8)
    large = dataclasses.replace(SMALL, **sizes, head_dim=64, d_ff=1408, tie_embeddings=True)
    # Random numbers for one layer do for all: what they are takes no memory.
    tensors = weight_files.draw_tensors(dataclasses.replace(large, num_layers=1))
    for layer in range(1, large.num_layers):
        tensors |= {
            name.replace(".0.", f".{layer}."): rows
            for name, rows in tensors.items()
            if ".layers.0." in name
        }
    folder = weight_files.write_hf(tmp_path / "large", large, tensors)
    small = weight_files.write_hf(tmp_path / "small", SMALL, weight_files.draw_tensors(SMALL))
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(small), str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    before, after = map(int, result.stdout.split())
    leaves = [4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(llama.abstract_params(large))]
    tensor = max(rows.nbytes for rows in tensors.values())
    assert sum(leaves) > 180e6
    slack = 16 * 2**20  # compiled programs, what the allocator keeps
    assert after - before < sum(leaves) + max(leaves) + tensor + slack
    assert after - before > 0.9 * sum(leaves)  # or nothing was measured


def _refused(folder, match, names, **options):
    with (
        weight_files.limits(),
        pytest.raises((ValueError, FileNotFoundError), match=match) as caught,
    ):
        weights.load_hf(folder, **options)
    weight_files.check_refusal(caught.value, names=[folder / name for name in names])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.pop(QUERY), f"1 tensor is missing: {QUERY}"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"missing: lm_head\.weight"),
        (
            lambda tensors: tensors.update({"extra": np.ones(3, np.float32)}),
            "1 tensor is unexpected: extra",
        ),
        (
            lambda tensors: tensors.update({QUERY: tensors[QUERY].T.copy()}),
            rf"of another shape: {QUERY} \[64, 96\] instead of \[96, 64\]",
        ),
        (
            lambda tensors: tensors[QUERY].__setitem__((3, 5), np.nan),
            f"tensor {QUERY} has NaN or infinite values",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, match):
    _refused(_write(tmp_path / "model", change=change), match, [SINGLE])


@pytest.mark.bad_input
@pytest.mark.parametrize("size", [0, 5, 9, 500, -1, -1000])
def test_truncated_files(tmp_path, size):
    folder = _write(tmp_path / "model")
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:size])
    _refused(folder, "too few|says its header|lies in bytes|damaged", [SINGLE])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is 'GPT2LMHeadModel'; supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
        ({"num_hidden_layers": 10**6}, "too few for 1000000 layers"),
        ({"num_key_value_heads": 4}, "num_heads=6 is no multiple of num_kv_heads=4"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a finite number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling is 'yarn'"),
    ],
)
def test_other_configurations(tmp_path, entries, match):
    _refused(_write(tmp_path / "model", **entries), match, ["config.json", SINGLE])


@pytest.mark.bad_input
def test_missing_and_foreign_files(tmp_path):
    folder = _write(tmp_path / "model", num_files=3)
    part = folder / "model-00002-of-00003.safetensors"
    data = part.read_bytes()
    part.write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    _refused(folder, "does not hold what", [part.name])
    part.unlink()
    _refused(folder, "names model-00002-of-00003.safetensors, which is missing", [INDEX])
    part.write_bytes(data)
    weights.load_hf(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][QUERY] = "../other.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    _refused(folder, f"tensor {QUERY} is in '../other.safetensors'", [INDEX])
    (folder / INDEX).unlink()
    _refused(folder, "neither model.safetensors nor", [""])
    (folder / "config.json").write_text("{")
    _refused(folder, "no JSON", ["config.json"])
    (folder / "config.json").unlink()
    _refused(folder, "is missing", ["config.json"])


@pytest.mark.bad_input
def test_folders_that_are_not_written(tmp_path):
    folder = _write(tmp_path / "model")
    with pytest.raises(ValueError, match="holds a model already"):
        weights.save_hf(folder, SMALL, _params(SMALL))
    with pytest.raises(ValueError, match=r"leaf embedding is BlockQuantized .* expected"):
        weights.save_hf(tmp_path / "a", SMALL, llama.quantize_params(_params(SMALL), 8))
    params = _params(SMALL)
    del params["head"]
    with pytest.raises(ValueError, match="1 leaf is missing: head"):
        weights.save_hf(tmp_path / "a", SMALL, params)
    assert not (tmp_path / "a").exists()


def _change(description, path, value):
    *parents, key = path
    for parent in parents:
        description = description[parent]
    description[key] = value


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (["config", "num_layers"], 2.0, "num_layers must be an int, got 2.0"),
        (["config", "num_layers"], 3, "layers/attention_norm is float32"),
        (["config", "more"], 3, "more"),
        (["config"], [], "damaged"),
        (["config", "rope", "theta"], float("inf"), "theta must be above 0 and finite"),
        (["leaves"], {}, "do not fit"),
        (["leaves", QUERY_LEAF, "bits"], 5, "bits is 5; blocks have 4 or 8 bits"),
        (["leaves", QUERY_LEAF, "in"], [7], "layers/query is BlockQuantized"),
        (["leaves", QUERY_LEAF, "values", "shape"], [1, 2], "layers/query is BlockQuantized"),
        (["leaves", QUERY_LEAF, "scale", "dtype"], "float1", "damaged"),
        (["leaves", "final_norm", "shape"], ["x"], "damaged"),
    ],
)
def test_damaged_orbax_configuration(tmp_path, path, value, match):
    folder = tmp_path / "model"
    weights.save_orbax(folder, SMALL, llama.quantize_params(_params(SMALL), 8))
    description = json.loads((folder / "config.json").read_text())
    _change(description, path, value)
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=match) as caught:
        weights.load_orbax(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.bad_input
def test_orbax_folders_without_parameters(tmp_path):
    folder = tmp_path / "model"
    weights.save_orbax(folder, SMALL, _params(SMALL))
    with pytest.raises(ValueError, match="is there and not empty; choose a new folder"):
        weights.save_orbax(folder, SMALL, _params(SMALL))
    shutil.rmtree(next((folder / "params").glob("0")))
    with pytest.raises(ValueError, match="has no parameters; the save was cut off"):
        weights.load_orbax(folder)
    shutil.rmtree(folder / "params")
    with pytest.raises(FileNotFoundError, match="params is missing; save_orbax writes it"):
        weights.load_orbax(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        weights.load_orbax(folder)


@pytest.mark.bad_input
def test_names_and_numbers_without_end(tmp_path):
    """Neither the system nor Python's integers are asked about them."""
    folder = _write(tmp_path / "model", num_files=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][QUERY] = "a" * 300 + ".safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    _refused(folder, f"tensor {QUERY} is in 'aaa", [INDEX])
    tensors = weight_files.draw_tensors(SMALL)
    header = weight_files.safetensors_header(tensors)
    header[QUERY]["shape"] = [10**4000, 10**4000]
    folder = weight_files.write_hf(tmp_path / "other", SMALL, tensors)
    data = weight_files.safetensors_bytes(tensors, header=header)
    (folder / SINGLE).write_bytes(data)
    _refused(folder, f"tensor {QUERY}", [SINGLE])
