"""Weights of Hugging Face folders and orbax checkpoints: round trips, other writers, bad input."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from icmljax.language import llama, weights
from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BlockQuantized
from icmljax.training import mesh as mesh_lib
from tests.language import weight_files
from tests.language.weight_files import EXPERTS, SMALL, STORED

TIED = dataclasses.replace(SMALL, tie_embeddings=True)
MODELS = pytest.mark.parametrize("config", [SMALL, TIED, EXPERTS], ids=["head", "tied", "experts"])
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
FUSED = dataclasses.replace(SMALL, num_heads=4)  # InternLM2's heads share the model's width


def _expected(config, tensors, kind="F32", dtype=jnp.float32):
    """Parameters of `dtype` from tensors stored as `kind`."""
    stored = {name: rows.astype(STORED[kind]) for name, rows in tensors.items()}
    expected = weight_files.expected_params(config, stored)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), expected)


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kind", STORED)
@MODELS
def test_load(tmp_path, config, kind, num_files):
    tensors = weight_files.draw_tensors(config)
    folder = weight_files.write_hf(tmp_path / "model", config, tensors, kind, num_files)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        got, params = weights.load_hf(folder, dtype=dtype)
        assert got == config
        weight_files.assert_same(params, _expected(config, tensors, kind, dtype))


@pytest.mark.parametrize("max_shard_bytes", [5e9, 40_000])
@pytest.mark.parametrize("kind", STORED)
@MODELS
def test_save(tmp_path, config, kind, max_shard_bytes):
    """The files have the tensors that they were drawn from, and come back as they were."""
    tensors = weight_files.draw_tensors(config)
    params = jax.tree.map(jnp.asarray, _expected(config, tensors, kind, STORED[kind]))
    folder = tmp_path / "model"
    weights.save_hf(folder, config, params, max_shard_bytes=max_shard_bytes)
    got, again = weights.load_hf(folder, dtype=STORED[kind])
    assert got == config
    weight_files.assert_same(again, params)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    stored = {}
    for file in files:
        data = (folder / file).read_bytes()
        for name, entry in safetensors.deserialize(data):
            assert entry["dtype"] == kind
            rows = np.frombuffer(entry["data"], STORED[kind]).reshape(entry["shape"])
            stored[name] = file, rows
    assert stored.keys() == tensors.keys()
    for name, (_, rows) in stored.items():
        np.testing.assert_array_equal(rows, tensors[name].astype(STORED[kind]))
    index = folder / "model.safetensors.index.json"
    if max_shard_bytes == 5e9:
        assert files == ["model.safetensors"] and not index.exists()
        return
    number = len(files)
    assert number > 1
    assert files == [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    for file in files:
        sizes = [rows.nbytes for place, rows in stored.values() if place == file]
        assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
    content = json.loads(index.read_text())
    assert content["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert content["metadata"]["total_size"] == sum(rows.nbytes for _, rows in stored.values())


def test_other_programs_read_and_write_the_same_files(tmp_path):
    tensors = weight_files.draw_tensors(SMALL)
    params = jax.tree.map(jnp.asarray, _expected(SMALL, tensors))
    weights.save_hf(tmp_path / "ours", SMALL, params)
    read = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, rows in read.items():
        np.testing.assert_array_equal(rows, tensors[name])
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert weight_files.hf_config(SMALL).items() <= config.items()
    # It writes tensors in another order, and without our metadata.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    safetensors.numpy.save_file(tensors, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(weight_files.hf_config(SMALL)))
    got, loaded = weights.load_hf(theirs)
    assert got == SMALL
    weight_files.assert_same(loaded, params)


def test_header_of_odd_length(tmp_path):
    """Tensors need not lie at a multiple of their items' size."""
    tensors = weight_files.draw_tensors(SMALL)
    folder = weight_files.write_hf(tmp_path / "model", SMALL, tensors)
    for spaces in range(4):
        header = json.dumps(weight_files.safetensors_header(tensors)).encode() + b" " * spaces
        data = weight_files.safetensors_bytes(tensors, header=header)
        (folder / "model.safetensors").write_bytes(data)
        weight_files.assert_same(weights.load_hf(folder)[1], _expected(SMALL, tensors))


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 4.0), LLAMA3], ids=["none", "linear", "llama3"]
)
@pytest.mark.parametrize("experts", [0, 3])
def test_configuration_comes_back(tmp_path, scaling, experts):
    config = dataclasses.replace(
        EXPERTS if experts else SMALL, rope=Rope(3e5, scaling=scaling), tie_embeddings=True
    )
    params = llama.init(jax.random.key(0), config)
    weights.save_hf(tmp_path / "model", config, params)
    got, again = weights.load_hf(tmp_path / "model")
    assert got == config
    weight_files.assert_same(again, params)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"architectures": None, "model_type": "llama"}, {}),
        ({"rope_theta": None}, {"rope": Rope(10_000.0)}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ({"head_dim": None, "num_attention_heads": 4}, {"num_heads": 4}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"rope_scaling": {"rope_type": "default"}}, {}),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope": Rope(5000.0, scaling=RopeScaling("linear", 2.0))},
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 7e4, "rope_type": "linear", "factor": 2.5},
            },
            {"rope": Rope(7e4, scaling=RopeScaling("linear", 2.5))},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            {"rope": Rope(5000.0, scaling=LLAMA3)},
        ),
        ({"sliding_window": 40, "partial_rotary_factor": 1.0, "attention_bias": False}, {}),
        ({"hidden_dropout": 0.1, "torch_dtype": "bfloat16", "vocab_size": 71}, {"vocab_size": 71}),
    ],
)
def test_configuration(changes, expected):
    config = weights.config_from_hf(weight_files.hf_config(SMALL, **changes))
    assert config == dataclasses.replace(SMALL, **expected)


def test_default_theta_of_mixtral():
    config = weights.config_from_hf(weight_files.hf_config(EXPERTS, rope_theta=None))
    assert config == EXPERTS and config.rope.theta == 1e6


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


def test_interleaved_channels_are_saved_in_half_order(tmp_path):
    expected = _expected(SMALL, weight_files.draw_tensors(SMALL))
    # Channel 2 i of the interleaved order is channel i, and 2 i + 1 is i + head_dim / 2.
    order = np.arange(SMALL.head_dim).reshape(2, -1).T.ravel()
    changed = {name: jnp.asarray(expected["layers"][name][..., order]) for name in ("query", "key")}
    params = {**expected, "layers": expected["layers"] | changed}
    config = dataclasses.replace(SMALL, rope=dataclasses.replace(SMALL.rope, interleaved=True))
    params = jax.tree.map(jnp.asarray, params)
    weights.save_hf(tmp_path / "model", config, params)
    got, again = weights.load_hf(tmp_path / "model")
    assert got == SMALL
    weight_files.assert_same(again, expected)
    # Both are one model.
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 12)), jnp.int32)
    logits = llama.forward(params, config, tokens)
    error = np.abs(llama.forward(again, got, tokens) - logits).max()
    assert error <= 1e-5 * np.abs(logits).max()


def _internlm2_tensors(config, tensors):
    """Queries, keys and values in one matrix, head by head, as InternLM2 has them."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    result = {}
    for name, rows in tensors.items():
        if not any(f"{letter}_proj" in name for letter in "qkv"):
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            result[name] = rows
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    for layer in range(config.num_layers):
        query, key, value = (
            tensors[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv"
        )
        pieces = []
        for head in range(config.num_kv_heads):
            queries = query[head * group * width :][: group * width]
            pieces += [queries, key[head * width :][:width], value[head * width :][:width]]
        fused = np.concatenate(pieces)
        result[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    return result


INTERNLM2 = {"architectures": ["InternLM2ForCausalLM"], "head_dim": None, "bias": False}


@pytest.mark.parametrize("num_files", [1, 2])
def test_internlm2(tmp_path, num_files):
    tensors = weight_files.draw_tensors(FUSED)
    fused = _internlm2_tensors(FUSED, tensors)
    assert len(fused) == len(tensors) - 2 * FUSED.num_layers
    folder = tmp_path / "model"
    weight_files.write_hf(folder, FUSED, fused, "BF16", num_files, **INTERNLM2)
    got, params = weights.load_hf(folder)
    assert got == FUSED
    weight_files.assert_same(params, _expected(FUSED, tensors, "BF16"))


def test_tensors_that_say_nothing_new(tmp_path):
    """Old files' rotary frequencies, and the embedding once more as the head."""
    tensors = weight_files.draw_tensors(TIED)
    more = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    for layer in range(2):
        more[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    folder = weight_files.write_hf(tmp_path / "model", TIED, more)
    got, params = weights.load_hf(folder)
    assert got == TIED
    weight_files.assert_same(params, _expected(TIED, tensors))


NARROW = dataclasses.replace(SMALL, d_model=48)  # 32 divides the inputs of two matrices only


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "config", [SMALL, TIED, EXPERTS, NARROW], ids=["head", "tied", "experts", "narrow"]
)
def test_rounding_while_loading_is_rounding_after_it(tmp_path, config, bits, dtype):
    folder = weight_files.write_hf(tmp_path / "model", config, weight_files.draw_tensors(config))
    got, dense = weights.load_hf(folder, dtype=dtype)
    _, rounded = weights.load_hf(folder, dtype=dtype, quantize_bits=bits)
    assert got == config
    expected = llama.quantize_params(dense, bits)
    weight_files.assert_same(rounded, _made_dense(expected))
    kinds = [type(leaf) for leaf in _leaves(rounded)]
    assert kinds == [type(leaf) for leaf in _leaves(expected)]
    assert kinds.count(BlockQuantized) == (2 if config is NARROW else 8 + ("head" in rounded))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, 9)), jnp.int32)
    if config is SMALL and dtype == jnp.float32:
        logits = llama.forward(expected, config, tokens)
        error = np.abs(llama.forward(rounded, config, tokens) - logits).max()
        assert error <= 1e-5 * np.abs(logits).max()


def _is_quantized(leaf):
    return isinstance(leaf, BlockQuantized)


def _leaves(params):
    return jax.tree.leaves(params, is_leaf=_is_quantized)


def _made_dense(params):
    """Dense leaves, tables [V, D] again."""
    dense = jax.tree.map(
        lambda leaf: leaf.dense() if _is_quantized(leaf) else leaf, params, is_leaf=_is_quantized
    )
    tables = {
        name: dense[name].T
        for name in ("embedding", "head")
        if name in params and _is_quantized(params[name])
    }
    return dense | tables


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_onto_a_mesh(tmp_path, config, bits):
    folder = weight_files.write_hf(tmp_path / "model", config, weight_files.draw_tensors(config))
    _, plain = weights.load_hf(folder, quantize_bits=bits)
    mesh = mesh_lib.make_mesh("data=4,model=2")
    got, params = weights.load_hf(folder, quantize_bits=bits, shardings=mesh)
    assert got == config
    shardings = mesh_lib.param_shardings(plain, llama.sharding_rules(config, mesh), mesh)
    _check_placed(params, plain, shardings)
    # Another tree of shardings: everything on the fourth device.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    shardings = jax.tree.map(lambda leaf: device, plain)
    _, params = weights.load_hf(folder, quantize_bits=bits, shardings=shardings)
    _check_placed(params, plain, shardings)
    weights.save_hf(tmp_path / "again", config, _made_dense(params))


def _check_placed(params, plain, shardings):
    jax.tree.map(np.testing.assert_array_equal, params, plain)

    def check(leaf, sharding):
        assert leaf.sharding == sharding

    jax.tree.map(check, params, shardings)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)) or (
        len(jax.tree.leaves(shardings)[0].device_set) == 1
    )


def test_sharded_parameters_are_saved_whole(tmp_path):
    expected = _expected(SMALL, weight_files.draw_tensors(SMALL))
    mesh = mesh_lib.make_mesh("data=2,model=4")
    shardings = mesh_lib.param_shardings(expected, llama.sharding_rules(SMALL, mesh), mesh)
    params = jax.device_put(expected, shardings)
    weights.save_hf(tmp_path / "hf", SMALL, params)
    weight_files.assert_same(weights.load_hf(tmp_path / "hf")[1], expected)
    weights.save_orbax(tmp_path / "orbax", SMALL, params)
    _, loaded = weights.load_orbax(tmp_path / "orbax")
    weight_files.assert_same(loaded, expected)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("config", [TIED, EXPERTS], ids=["tied", "experts"])
def test_orbax(tmp_path, config, bits):
    scaled = dataclasses.replace(config.rope, scaling=LLAMA3, interleaved=True)
    config = dataclasses.replace(config, rope=scaled, remat=True)
    tensors = weight_files.draw_tensors(config)
    dtype = jnp.bfloat16 if bits is None else jnp.float32
    params = jax.tree.map(jnp.asarray, _expected(config, tensors, dtype=dtype))
    params = params if bits is None else llama.quantize_params(params, bits)
    weights.save_orbax(tmp_path / "model", config, params)
    got, again = weights.load_orbax(tmp_path / "model")
    assert got == config
    weight_files.assert_same(again, _made_dense(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    if bits == 8:
        return
    mesh = mesh_lib.make_mesh("data=4,model=2")
    _, placed = weights.load_orbax(tmp_path / "model", shardings=mesh)
    shardings = mesh_lib.param_shardings(params, llama.sharding_rules(config, mesh), mesh)
    _check_placed(placed, params, shardings)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    shardings = jax.tree.map(lambda leaf: device, params)
    _, placed = weights.load_orbax(tmp_path / "model", shardings=shardings)
    _check_placed(placed, params, shardings)


def test_gguf_to_orbax(tmp_path):
    """Blocks with an offset, from a file, are kept as they are."""
    path = weight_files.write_gguf_model(
        tmp_path / "small.gguf", SMALL, weight_files.draw_tensors(SMALL), "Q4_0"
    )
    config, params = weights.load_gguf(path, keep_quantized=True, rope_order="interleaved")
    weights.save_orbax(tmp_path / "model", config, params)
    got, again = weights.load_orbax(tmp_path / "model")
    assert got == config and jax.tree.structure(again) == jax.tree.structure(params)
    weight_files.assert_same(again, _made_dense(params))


# Reads a folder and says the most memory that it had of its own at once, above what it started
# with. Pages of the files themselves, which the system may drop at any time, do not count.
_MEASURE = """
    import json, sys, threading, time
    import jax
    from icmljax.language import weights

    def own_bytes():
        with open("/proc/self/status") as file:
            lines = [line for line in file if line.startswith("RssAnon")]
        return int(lines[0].split()[1]) * 1024

    peaks, done = [], threading.Event()

    def watch(index):
        while not done.is_set():
            peaks[index] = max(peaks[index], own_bytes())
            time.sleep(0.001)

    small, *jobs = json.loads(sys.argv[1])
    for folder, options in (small, *jobs):
        load = weights.load_gguf if folder.endswith("gguf") else weights.load_hf
        done.clear()
        start = own_bytes()
        peaks.append(start)
        thread = threading.Thread(target=watch, args=(len(peaks) - 1,))
        thread.start()
        params = jax.block_until_ready(load(folder, **options))[1]
        done.set()
        thread.join()
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
        print(json.dumps({"peak": peaks[-1] - start, "held": held, "largest": largest}))
        del params
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_loading_streams(tmp_path):
    """Never in memory at once: more than the parameters and two copies of one leaf of them."""
    config = dataclasses.replace(
        SMALL, vocab_size=16_000, d_model=512, num_layers=16, d_ff=1024, num_heads=8, head_dim=64
    )
    params = llama.init(jax.random.key(0), config)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest_matrix = params["embedding"].nbytes
    folder = tmp_path / "large"
    weights.save_hf(folder, config, params)
    size = (folder / "model.safetensors").stat().st_size
    assert 190e6 < size < 230e6
    small = weight_files.write_hf(tmp_path / "small", SMALL, weight_files.draw_tensors(SMALL))
    # The small folder first: what loading needs at all, such as the code that rounds.
    jobs = [
        (str(small), {"quantize_bits": 8}),
        (str(folder), {}),
        (str(folder), {"quantize_bits": 8}),
    ]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE), json.dumps(jobs)],
        capture_output=True,
        text=True,
        check=True,
    )
    _, dense, rounded = (json.loads(line) for line in result.stdout.splitlines())
    slack = 24e6
    assert dense["held"] == held
    assert dense["held"] - slack < dense["peak"] < dense["held"] + 2 * dense["largest"] + slack
    # The largest matrix is rounded in float32 by eight operations, each with a result of its size.
    assert rounded["held"] < 0.3 * size
    bound = rounded["held"] + rounded["largest"] + 8 * largest_matrix + slack
    assert rounded["held"] - slack < rounded["peak"] < bound
