"""Tests of icmljax.data.text."""

import os
import sysconfig
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from icmljax.data import text as text_lib
from icmljax.data.text import (
    byte_tokens,
    char_tokens,
    evaluation_batches,
    load_bin,
    pack,
    read_text,
    standard_library_text,
    token_batches,
)


def _write_bin(folder: Path, train=range(300), val=range(100), dtype=np.uint16) -> Path:
    np.array(train, dtype).tofile(folder / "train.bin")
    np.array(val, dtype).tofile(folder / "val.bin")
    return folder


# Reading text


def test_standard_library_is_whole_sorted_and_reproducible():
    text = standard_library_text()
    assert len(text) > 5_000_000
    text.decode("utf-8")  # all of it is UTF-8
    root = Path(sysconfig.get_path("stdlib"))
    positions = [
        text.find(b"\n" + (root / name).read_bytes() + b"\n")
        for name in ("ast.py", "asyncio/events.py", "json/decoder.py", "this.py")
    ]
    assert positions == sorted(positions) and positions[0] > 0
    assert (root / "unittest/case.py").read_bytes() in text
    # Packages, tests and paths of the build machine are not part of it.
    assert Path(np.__file__).read_bytes() not in text
    left_out = [*root.glob("_sysconfigdata*.py"), root / "test/test_sys.py"]
    left_out += sorted(root.glob("*/test*/test_*.py"))[:5]
    assert not any(path.exists() and path.read_bytes() in text for path in left_out)


def test_standard_library_is_cut_where_asked():
    text = standard_library_text()
    for size in (1, 123_457):
        assert standard_library_text(size) == text[:size]
    assert standard_library_text(len(text)) == standard_library_text(len(text) + 1) == text
    # Inside of a character of several bytes the cut moves to the character's start.
    inside = next(i for i, byte in enumerate(text) if byte & 0xC0 == 0x80)
    cut = standard_library_text(inside)
    assert cut == text[: inside - 1] and text[inside - 1] >= 0xC0


def test_read_text_takes_a_file_or_a_sorted_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"two")
    (tmp_path / "b.txt").write_bytes(b"one")
    (tmp_path / "c.md").write_bytes("drei \N{SNOWMAN}".encode())
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"no")
    assert read_text(tmp_path / "b.txt") == b"one"
    assert read_text(str(tmp_path)) == "one\ntwo\ndrei \N{SNOWMAN}".encode()


@pytest.mark.bad_input
def test_text_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder: .*nothing"):
        read_text(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no files"):
        read_text(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b" \n")
    with pytest.raises(ValueError, match="no text in"):
        read_text(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(ValueError, match=r"image\.png is binary"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="max_bytes must be positive or None, got 0"):
        standard_library_text(0)


def test_an_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="without its standard library's sources"):
        standard_library_text()


# Tokens


def test_byte_tokens_are_the_bytes():
    text = bytes(range(256)) * 10
    tokens = byte_tokens(text, validation_fraction=0.25)
    assert tokens.vocab_size == 256 and tokens.train.dtype == np.uint8
    assert (len(tokens.train), len(tokens.validation)) == (1920, 640)
    assert tokens.train.tobytes() + tokens.validation.tobytes() == text
    assert tokens.source == "bytes: 1920 + 640 tokens"


@pytest.mark.parametrize(("num_characters", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_char_tokens_index_the_sorted_characters(num_characters, dtype):
    characters = [chr(0x3B1 + 7 * i) for i in range(num_characters)]  # one, two and three bytes
    text = "".join(np.random.default_rng(0).permutation(characters * 3))
    tokens = char_tokens(text.encode())
    assert tokens.vocab_size == num_characters and tokens.train.dtype == dtype
    both = np.concatenate([tokens.train, tokens.validation])
    assert "".join(characters[token] for token in both) == text


def test_fingerprint_depends_on_all_that_determines_the_tokens():
    text = b"to be or not to be"
    variants = [
        byte_tokens(text),
        byte_tokens(text + b"?"),
        byte_tokens(text, validation_fraction=0.2),
        char_tokens(text),
    ]
    assert len({tokens.fingerprint for tokens in variants}) == 4
    assert byte_tokens(text).fingerprint == variants[0].fingerprint
    assert all(len(tokens.fingerprint) == 16 for tokens in variants)
    int(variants[0].fingerprint, 16)


@pytest.mark.bad_input
def test_text_that_cannot_be_tokenised():
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 2: .*bytes as tokens"):
        char_tokens(b"ab\xff")
    with pytest.raises(ValueError, match="1 tokens cannot be split"):
        byte_tokens(b"a")
    with pytest.raises(ValueError, match="0 tokens cannot be split"):
        char_tokens(b"")
    for fraction in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=r"validation_fraction must lie in \(0, 1\)"):
            byte_tokens(b"abc", validation_fraction=fraction)


# nanoGPT's files


def test_load_bin_maps_the_files(tmp_path):
    tokens = load_bin(_write_bin(tmp_path), vocab_size=300)
    assert isinstance(tokens.train, np.memmap) and tokens.train.dtype == np.uint16
    np.testing.assert_array_equal(tokens.train, np.arange(300))
    np.testing.assert_array_equal(tokens.validation, np.arange(100))
    assert tokens.vocab_size == 300
    assert load_bin(str(tmp_path), vocab_size=300).fingerprint == tokens.fingerprint
    assert load_bin(tmp_path).fingerprint != tokens.fingerprint
    _write_bin(tmp_path, val=range(1, 101))
    assert load_bin(tmp_path, vocab_size=300).fingerprint != tokens.fingerprint


def test_a_large_bin_is_looked_at_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lib, "_PROBES", 4)
    monkeypatch.setattr(text_lib, "_PROBE_TOKENS", 10)
    train = np.arange(1000) % 7
    _write_bin(tmp_path, train=train)
    fingerprint = load_bin(tmp_path, vocab_size=100).fingerprint
    train[500] = 3
    assert load_bin(_write_bin(tmp_path, train=train), vocab_size=100).fingerprint == fingerprint
    for place in (5, 333, 998):
        train[place] = 99
        changed = load_bin(_write_bin(tmp_path, train=train), vocab_size=100).fingerprint
        assert changed != fingerprint
        fingerprint = changed


@pytest.mark.bad_input
def test_a_large_bin_of_another_type(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lib, "_PROBES", 4)
    monkeypatch.setattr(text_lib, "_PROBE_TOKENS", 32)
    for size in (999, 1000, 1001, 1002):  # the places looked at start at odd tokens too
        with pytest.raises(ValueError, match="looks like 32-bit integers"):
            load_bin(_write_bin(tmp_path, train=[7] * size, dtype=np.uint32))


@pytest.mark.bad_input
def test_bad_bin_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.bin not found.*nanoGPT.*prepare\.py"):
        load_bin(tmp_path)
    _write_bin(tmp_path)
    (tmp_path / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.bin not found"):
        load_bin(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val\.bin is empty, expected uint16"):
        load_bin(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"val\.bin has 3 bytes, an odd number"):
        load_bin(tmp_path)
    with pytest.raises(ValueError, match=r"train\.bin holds the token 299.*vocab_size=299"):
        load_bin(_write_bin(tmp_path), vocab_size=299)
    for dtype in (np.uint32, np.int64):
        with pytest.raises(ValueError, match="looks like 32-bit integers; expected uint16"):
            load_bin(_write_bin(tmp_path, dtype=dtype))
    with pytest.raises(ValueError, match="expected tokens below vocab_size"):
        load_bin(_write_bin(tmp_path, train=np.linspace(0, 1, 300), dtype=np.float32))
    tokens = load_bin(_write_bin(tmp_path, train=range(16)))
    with pytest.raises(ValueError, match="16 tokens are shorter than a block: block_size=16.* 17"):
        token_batches(tokens.train, batch_size=2, block_size=16, seed=0, fingerprint="")


# Batches


def _batches(tokens=None, **kwargs):
    tokens = np.arange(1000, dtype=np.uint16) if tokens is None else tokens
    kwargs = {"batch_size": 8, "block_size": 16, "seed": 5, "fingerprint": "f"} | kwargs
    return token_batches(tokens, **kwargs)


@pytest.mark.parametrize("mapped", [False, True])
def test_batches_are_blocks_of_the_text_with_the_next_tokens(tmp_path, mapped):
    tokens = load_bin(_write_bin(tmp_path, train=range(1000))).train if mapped else None
    batch = next(_batches(tokens))
    for array in batch.values():
        assert array.dtype == np.int32 and array.shape == (8, 16)
        assert type(array) is np.ndarray and array.flags.c_contiguous
    np.testing.assert_array_equal(batch["inputs"], batch["inputs"][:, :1] + np.arange(16))
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_every_position_is_drawn_equally_often():
    # 4 positions, 4000 draws: each count is 1000 +- 27; 6 deviations happen once in 1e9 runs.
    batch = next(_batches(np.arange(20), batch_size=4000))
    counts = np.bincount(batch["inputs"][:, 0], minlength=4)
    assert counts.shape == (4,) and abs(counts - 1000).max() < 6 * 27.4


def test_batches_depend_on_seed_and_index_alone():
    batches = _batches()
    first = [next(batches)["inputs"] for _ in range(5)]
    assert len({batch.tobytes() for batch in first}) == 5
    assert not np.array_equal(first[0], next(_batches(seed=6))["inputs"])
    resumed = _batches()
    resumed.restore({**batches.state(), "index": 3})
    np.testing.assert_array_equal(next(resumed)["inputs"], first[3])
    np.testing.assert_array_equal(next(resumed)["inputs"], first[4])
    assert resumed.state() == batches.state()


def test_processes_share_the_rows_of_the_global_batch():
    whole, parts = _batches(), [_batches(process_index=i, process_count=4) for i in range(4)]
    for _ in range(3):
        expected, shares = next(whole), [next(part) for part in parts]
        for name in ("inputs", "targets"):
            assert shares[0][name].shape == (2, 16)
            joined = np.concatenate([share[name] for share in shares])
            np.testing.assert_array_equal(joined, expected[name])
    # A run may be resumed by another number of processes.
    assert parts[2].state() == whole.state()


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"block_size": 8}, {"seed": 6}])
@pytest.mark.bad_input
def test_state_of_other_batches_is_refused(change):
    with pytest.raises(ValueError, match="resume with the same data, batch size and seed"):
        _batches(**change).restore(_batches().state())


def test_evaluation_batches_are_fixed_and_spread_over_the_text():
    tokens = np.arange(1000)
    batches = evaluation_batches(tokens, batch_size=4, block_size=16, num_batches=3)
    assert len(batches) == 3
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    targets = np.concatenate([batch["targets"] for batch in batches])
    assert inputs[0, 0] == 0 and targets[-1, -1] == 999
    np.testing.assert_array_equal(targets, inputs + 1)
    gaps = np.diff(inputs[:, 0])
    assert gaps.min() >= gaps.max() - 1 > 80
    shares = [
        evaluation_batches(
            tokens,
            batch_size=4,
            block_size=16,
            num_batches=3,
            process_index=i,
            process_count=2,
        )
        for i in range(2)
    ]
    joined = np.concatenate([shares[0][1]["inputs"], shares[1][1]["inputs"]])
    np.testing.assert_array_equal(joined, batches[1]["inputs"])


@pytest.mark.bad_input
def test_bad_batch_arguments():
    with pytest.raises(ValueError, match=r"multiple of the number of processes \(3\), got 8"):
        _batches(process_count=3)
    with pytest.raises(ValueError, match=r"process_index must lie in 0 \.\. 1, got 2"):
        _batches(process_index=2, process_count=2)
    with pytest.raises(ValueError, match="got 0"):
        _batches(batch_size=0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        _batches(block_size=0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -3"):
        _batches(seed=-3)
    with pytest.raises(ValueError, match="num_batches must be at least 1, got 0"):
        evaluation_batches(np.arange(99), batch_size=1, block_size=8, num_batches=0)


def test_a_huge_file_costs_no_memory(tmp_path):
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2 * 10**10)  # sparse: 20 GB of zeros, none on the disk
    tokens = np.memmap(path, np.uint16, mode="r")
    batch = next(_batches(tokens))
    assert batch["inputs"].shape == (8, 16)


# Packing documents


def test_pack_by_hand():
    batch = pack([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]], 4, eos_id=99, pad_id=7)
    expected = {
        "tokens": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 7, 7]],
        "targets": [[2, 3, 99, 99], [6, 7, 8, 9], [10, 99, 7, 7]],
        "positions": [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 0]],
        "segments": [[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 0, 0]],
        "weights": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]],
    }
    assert batch.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_array_equal(batch[name], rows, err_msg=name)
        assert batch[name].dtype == (np.float32 if name == "weights" else np.int32)
    # Without an end of documents their last tokens have no target.
    batch = pack([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]], 4, pad_id=7)
    np.testing.assert_array_equal(batch["targets"], [[2, 3, 7, 7], [6, 7, 8, 9], [10, 7, 7, 7]])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    # The tightest row is filled, even if it is not the last one.
    batch = pack([[1] * 7, [2] * 6, [3] * 2], 8)
    assert batch["tokens"].tolist() == [[1] * 7 + [0], [2] * 6 + [3] * 2]


@hypothesis.given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    length=st.integers(1, 16),
    eos=st.booleans(),
)
def test_pack_keeps_every_token_and_every_target(lengths, length, eos):
    ends = np.cumsum(lengths)
    # All tokens are different, and count upwards within and across documents, from 1.
    documents = [np.arange(end - n, end) + 1 for n, end in zip(lengths, ends, strict=True)]
    eos_id = 10_000
    batch = pack(documents, length, eos_id=eos_id if eos else None)
    shapes = {array.shape for array in batch.values()}
    assert len(shapes) == 1 and shapes.pop()[1] == length
    tokens, targets, weights = batch["tokens"], batch["targets"], batch["weights"]
    real = batch["segments"] > 0
    # Every token is an input once; padding is on the right and no row is empty.
    np.testing.assert_array_equal(np.sort(tokens[real]), np.arange(ends[-1]) + 1)
    assert real[:, 0].all() and (np.diff(real.astype(int)) <= 0).all()
    for name in ("tokens", "targets", "positions", "weights"):
        assert not batch[name][~real].any()
    # Targets stay within a document: that of its last token is the end or nothing.
    is_last = np.isin(tokens, ends)
    expected = np.where(is_last, eos_id if eos else 0, tokens + 1)
    np.testing.assert_array_equal(targets[real], expected[real])
    np.testing.assert_array_equal(weights[real], (eos | ~is_last)[real])
    # In a segment the tokens are successive ones of one document, from position 0.
    document = np.searchsorted(ends, tokens)
    for row in range(len(tokens)):
        segments = batch["segments"][row][real[row]]
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}
        for segment in range(1, segments.max() + 1):
            inside = batch["segments"][row] == segment
            count = inside.sum()
            assert len(set(document[row][inside])) == 1
            assert (np.diff(tokens[row][inside]) == 1).all()
            np.testing.assert_array_equal(batch["positions"][row][inside], np.arange(count))
    # A document is cut only where a row is full.
    pieces = sum(-(-n // length) for n in lengths)
    assert batch["segments"].max(axis=1).sum() == pieces
    # No document would have fitted into an earlier row: at most one row is half empty.
    assert (real.sum(axis=1) <= length // 2).sum() <= 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([[1, 2]], 0, "length must be at least 1, got 0"),
        ([], 4, "no documents to pack"),
        ([[1], []], 4, r"document 1 has shape \(0,\).*leave out empty documents"),
        ([[[1, 2]]], 4, r"document 0 has shape \(1, 2\)"),
        ([[1, 2], [1, -1]], 4, "document 1 is of int64 and its least entry -1"),
        ([[1.5]], 4, "document 0 is of float64"),
    ],
)
def test_bad_documents(documents, length, message):
    with pytest.raises(ValueError, match=message):
        pack(documents, length)
