"""Damaged files of weights and tokenizers: a clear error or a valid model, in bounds.

Every mutation comes from a seed, which a failure names; nothing is drawn at run time.
"""

import dataclasses
import json
import resource
import struct
import sys
import time

import jax
import numpy as np
import pytest
import tokenizers

from icmljax.language import llama, tokenizer, weights
from icmljax.language.linear import BlockQuantized
from tests.language import weight_files

pytestmark = pytest.mark.bad_input

SMALL = dataclasses.replace(
    weight_files.SMALL, vocab_size=40, d_model=32, num_heads=2, num_kv_heads=1, d_ff=32
)
EXPERTS = dataclasses.replace(SMALL, num_experts=2, experts_per_token=1)
CONFIGS = (SMALL, dataclasses.replace(SMALL, tie_embeddings=True), EXPERTS)
ROUND = 40  # mutations a test
# A whole file takes some milliseconds and some hundred kilobytes.
SECONDS, MEGABYTES = 10, 256
EDGES = [0, 1, 2, 7, 31, 255, 2**15, 2**24, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
VALUES = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, 0.5, -2.5, 1e308, float("nan")]
VALUES += [float("inf"), "", "x", "\ud800", "a" * 300, "../x", "\0", [], {}, [[]], [1, 2], {"a": 1}]


def _mutated_bytes(rng, data, start=0, stop=None):
    """Damages bytes from `start` to `stop`: flips, cuts, inserts, copies, writes edge numbers."""
    data, stop = bytearray(data), len(data) if stop is None else stop
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(start, max(min(stop, len(data)), start + 1)))
        what = rng.integers(6)
        if what == 0:
            data[at : at + 1] = bytes(byte ^ 1 << rng.integers(8) for byte in data[at : at + 1])
        elif what == 1:
            del data[at : at + int(rng.integers(1, 40))]
        elif what == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 40)))
        elif what == 3:
            other = int(rng.integers(start, len(data) + 1))
            data[at : at + 16] = data[other : other + 16]
        elif what == 4:
            edge = struct.pack("<Q", int(rng.choice(np.array(EDGES, np.uint64))))
            size = int(rng.choice([4, 8]))
            data[at : at + size] = edge[:size]
        elif rng.random() < 0.3:
            del data[at:]
        else:
            data[at : at + 1] = rng.bytes(1)
    return bytes(data)


def _mutated_object(rng, root):
    """Replaces, drops, renames or repeats some values of a JSON object, wherever they are."""
    root = json.loads(json.dumps(root))
    for _ in range(rng.integers(1, 3)):
        places = list(_places(root))
        holder, key = places[rng.integers(len(places))]
        what, value = rng.integers(6), holder[key]
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif what == 2 and isinstance(value, int):
            holder[key] = value + int(rng.choice([-8, -1, 1, 8, 2**31, 2**60]))
        elif what == 3:
            other, place = places[rng.integers(len(places))]
            holder[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else value
        else:
            holder[key] = VALUES[rng.integers(len(VALUES))]
    return root


def _places(node):
    """All pairs of an object or list and a key of it."""
    for key in _keys(node):
        yield node, key
        yield from _places(node[key])


def _keys(node):
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node))) if isinstance(node, list) else []


def _mutated_json(rng, root):
    """The text of an object, damaged as an object or as bytes."""
    if rng.random() < 0.7:
        return json.dumps(_mutated_object(rng, root)).encode()
    return _mutated_bytes(rng, json.dumps(root).encode())


def _check_model(result):
    """Parameters have the shapes of their configuration and are finite."""
    config, params = result
    expected = jax.tree.leaves_with_path(llama.abstract_params(config))
    got = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))
    for (path, leaf), (wanted_path, wanted) in zip(got, expected, strict=True):
        assert path == wanted_path
        if isinstance(leaf, BlockQuantized):
            assert all(np.isfinite(array).all() for array in jax.tree.leaves(leaf)), path
            table = path[0].key in ("embedding", "head")
            shape = leaf.dense().shape[::-1] if table else leaf.dense().shape
        else:
            assert leaf.dtype == wanted.dtype and np.isfinite(leaf).all(), path
            shape = leaf.shape
        assert shape == wanted.shape, path


def _check_round(number, mutate, load, check, names):
    """Damages a file in `ROUND` ways; each ends in our error or in what `check` accepts.

    Returns:
      How often each of them happened.
    """
    # The whole file, with all options; what is compiled now takes no memory later.
    for seed in (8, 9):
        check(load(seed))
    counts, before = {"refused": 0, "loaded": 0}, _peak()
    for seed in range(ROUND * number, ROUND * (number + 1)):
        mutate(np.random.default_rng(seed))
        start = time.monotonic()
        try:
            with weight_files.limits(seconds=SECONDS):
                result, error = load(seed), None
        except BaseException as raised:  # whatever it is, the seed has to be told
            if isinstance(raised, KeyboardInterrupt):
                raise
            result, error = None, raised
        try:
            assert time.monotonic() - start < SECONDS
            if error is None:
                check(result)
            else:
                weight_files.check_refusal(error, names=names)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {problem!r}") from (error or problem)
        counts["loaded" if error is None else "refused"] += 1
    assert _peak() - before < MEGABYTES * 2**20, f"{_peak() - before} bytes more in round {number}"
    return counts


def _peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _gguf_places(path, data):
    """Every number of a GGUF header that says how much follows: position and bytes."""
    reader = weight_files.gguf.GGUFReader(path)
    places = [(4, 4), (8, 8), (16, 8)]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        position = field.offset
        for part in field.parts if position >= 24 else []:
            if part.dtype in (np.uint32, np.uint64):
                places.append((position, part.nbytes))
            position += part.nbytes
    header = data.index(b"blk.0.attn_norm.weight") // 32 * 32 + 32
    return places, max(header, max(at for at, _ in places) + 8)


@pytest.mark.parametrize("number", range(6))
def test_gguf(tmp_path, number):
    config, kind = CONFIGS[number % 3], ("Q8_0", "F32", "Q4_1", "F16", "Q4_0", "BF16")[number]
    path = tmp_path / "small.gguf"
    weight_files.write_gguf_model(path, config, weight_files.draw_tensors(config), kind)
    data = path.read_bytes()
    places, header = _gguf_places(path, data)

    def mutate(rng):
        what = rng.random()
        if what < 0.4:  # a length, a count, a type or an offset
            changed = bytearray(data)
            at, size = places[rng.integers(len(places))]
            before = int.from_bytes(data[at : at + size], "little")
            near = [before - 1, before + 1, before * 2, before + 32]
            value = [*EDGES, *near][rng.integers(len(EDGES) + len(near))] % 2**64
            changed[at : at + size] = struct.pack("<Q", value)[:size]
            path.write_bytes(changed)
        elif what < 0.7:
            path.write_bytes(_mutated_bytes(rng, data, 0, header))
        elif what < 0.8:
            path.write_bytes(data[: rng.integers(len(data))])
        else:
            path.write_bytes(_flipped(rng, data, header))

    def load(seed):
        return weights.load_gguf(path, keep_quantized=seed % 2 == 1)

    counts = _check_round(number, mutate, load, _check_model, [path])
    assert counts["refused"] > 2 and counts["loaded"], counts


def _flipped(rng, data, start):
    """Changes a bit of the weights, or makes some of them, or their scale, no numbers."""
    changed = bytearray(data)
    at = int(rng.integers(start, len(data)))
    if rng.random() < 0.4:
        changed[at : at + 40] = b"\xff" * len(changed[at : at + 40])
    else:
        changed[at] ^= 1 << rng.integers(8)
    return changed


@pytest.mark.parametrize("number", range(4))
def test_safetensors(tmp_path, number):
    config, kind = CONFIGS[number % 3], ("F16", "F32", "BF16", "F32")[number]
    tensors = weight_files.draw_tensors(config)
    folder = weight_files.write_hf(tmp_path / "model", config, tensors, kind)
    path = folder / "model.safetensors"
    data, header = path.read_bytes(), weight_files.safetensors_header(tensors, kind)
    start = 8 + len(json.dumps(header).encode())

    def mutate(rng):
        what = rng.random()
        if what < 0.15:  # two tensors have each other's name
            names = list(header)
            one, other = rng.choice(np.arange(1, len(names)), 2, replace=False)
            names[one], names[other] = names[other], names[one]
            changed = json.dumps(dict(zip(names, header.values(), strict=True))).encode()
            path.write_bytes(weight_files.safetensors_bytes(tensors, kind, changed))
        elif what < 0.4:  # a header that can be read, and says something else
            changed = json.dumps(_mutated_object(rng, header)).encode()
            path.write_bytes(weight_files.safetensors_bytes(tensors, kind, changed))
        elif what < 0.5:
            size = int(rng.choice(np.array([*EDGES, start - 7, start - 9], np.uint64)))
            path.write_bytes(struct.pack("<Q", size) + data[8:])
        elif what < 0.7:
            path.write_bytes(_mutated_bytes(rng, data, 0, start))
        elif what < 0.8:
            path.write_bytes(data[: rng.integers(len(data))])
        else:
            path.write_bytes(_flipped(rng, data, start))

    def load(seed):
        return weights.load_hf(folder, quantize_bits=8 if seed % 10 == 9 else None)

    counts = _check_round(number, mutate, load, _check_model, [path])
    assert counts["refused"] > 2 and counts["loaded"], counts


@pytest.mark.parametrize("number", range(4))
def test_config(tmp_path, number):
    config = CONFIGS[number % 3]
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    entries = weight_files.hf_config(config, rope_scaling=scaling)
    folder = weight_files.write_hf(
        tmp_path / "model", config, weight_files.draw_tensors(config), "F16"
    )
    path = folder / "config.json"

    def mutate(rng):
        path.write_bytes(_mutated_json(rng, entries))

    names = [path, folder / "model.safetensors"]  # which may be what does not fit
    counts = _check_round(number, mutate, lambda seed: weights.load_hf(folder), _check_model, names)
    assert counts["refused"] > 2 and counts["loaded"], counts


@pytest.mark.parametrize("number", range(3))
def test_index(tmp_path, number):
    tensors = weight_files.draw_tensors(SMALL)
    folder = weight_files.write_hf(tmp_path / "model", SMALL, tensors, "F16", num_files=2)
    path = folder / "model.safetensors.index.json"
    entries = json.loads(path.read_text())

    def mutate(rng):
        path.write_bytes(_mutated_json(rng, entries))

    names = [path, *folder.glob("*.safetensors")]
    counts = _check_round(number, mutate, lambda seed: weights.load_hf(folder), _check_model, names)
    assert counts["refused"] > 2, counts


@pytest.mark.parametrize("number", range(4))
def test_tokenizer(tmp_path, number):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(_tokenizer()))
    beside = tmp_path / "tokenizer_config.json"
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    beside.write_text(json.dumps(special))
    target, entries = (beside, special) if number == 3 else (path, _tokenizer())

    def mutate(rng):
        target.write_bytes(_mutated_json(rng, entries))

    def load(seed):
        return tokenizer.from_json(path)

    def check(result):
        # Whatever the vocabulary has become, what it says of a text it has to give back.
        try:
            ids = result.encode("hello the ab")
        except ValueError:  # a byte has lost its token
            return
        assert result.decode(ids, special=False) == "hello the ab"

    counts = _check_round(number, mutate, load, check, [path, beside])
    assert counts["refused"] > 2 and counts["loaded"], counts


def _tokenizer():
    """A small byte-level tokenizer."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    model = tokenizers.models.BPE(
        {word: index for index, word in enumerate(words)}, [tuple(m.split()) for m in merges]
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return json.loads(backend.to_str())
