"""Text as token arrays: the standard library's sources, text files, and nanoGPT's `.bin` files."""

import bisect
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from icmljax.data.batches import Batch, BatchIterator, random_generator

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PROBES = 256  # a `.bin` file is looked at in up to this many places ...
_PROBE_TOKENS = 2**19  # ... of this many tokens each, so one of up to 256 MiB is looked at whole


class Tokens(NamedTuple):
    """A tokenised text, split into a training part and a validation part (its end).

    Attributes:
      train: unsigned integers of shape (number of tokens,), possibly memory-mapped.
      validation: the same for the validation part.
      vocab_size: all tokens are smaller.
      fingerprint: 16 hexadecimal digits of a SHA-256 over everything that determines the tokens.
      source: what this is, for a log line.
    """

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    fingerprint: str
    source: str


def standard_library_text(max_bytes: int | None = None) -> bytes:
    """Returns the Python sources of the running interpreter's standard library, one after another.

    Files are sorted by their path. Installed packages, test folders and the generated
    `_sysconfigdata*` (it holds paths of the build machine) are left out.

    Args:
      max_bytes: length to cut the text to, at the start of a UTF-8 character; None: no limit.

    Raises:
      ValueError: `max_bytes` is not positive.
      FileNotFoundError: the interpreter came without sources.
    """
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive or None, got {max_bytes}")
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _sorted_files(root, left_out=_LEFT_OUT.__contains__)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise FileNotFoundError(
            f"no Python sources in {root}: this interpreter came without its standard library's"
            " sources; give a text file or folder instead"
        )
    texts, length = [], 0
    for file in files:
        texts.append(file.read_bytes())
        length += len(texts[-1]) + 1
        if max_bytes is not None and length > max_bytes + 1:
            break
    text = b"\n".join(texts)
    if max_bytes is not None and len(text) > max_bytes:
        end = max_bytes
        while text[end] & 0xC0 == 0x80:  # a continuation byte: the character began before
            end -= 1
        text = text[:end]
    return text


def read_text(path: str | Path) -> bytes:
    """Returns a text file, or all files of a folder (recursive, sorted by path, none hidden).

    Raises:
      FileNotFoundError: there is no such file or folder, or the folder holds no files.
      ValueError: a file is binary, or there is no text in them.
    """
    path = Path(path)
    if path.is_dir():
        files = _sorted_files(path, left_out=lambda name: name.startswith("."))
        if not files:
            raise FileNotFoundError(f"the folder {path} holds no files; expected text files")
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"no such file or folder: {path}; expected text")
    texts = []
    for file in files:
        texts.append(file.read_bytes())
        if b"\0" in texts[-1]:
            raise ValueError(f"{file} is binary (it holds a zero byte), expected text")
    text = b"\n".join(texts)
    if not text.strip():
        raise ValueError(f"there is no text in {path}")
    return text


def byte_tokens(text: bytes, validation_fraction: float = 0.1) -> Tokens:
    """Returns the bytes of a text as tokens of a vocabulary of 256.

    Args:
      text: any bytes.
      validation_fraction: share of the text, at its end, that is kept for validation; in (0, 1).

    Raises:
      ValueError: the fraction is out of range or leaves one of the parts empty.
    """
    tokens = np.frombuffer(text, np.uint8)
    return _split(tokens, 256, validation_fraction, "bytes", text)


def char_tokens(text: bytes, validation_fraction: float = 0.1) -> Tokens:
    """Returns the characters of a UTF-8 text as indices into the sorted list of those it has.

    Args:
      text: UTF-8.
      validation_fraction: share of the text, at its end, that is kept for validation; in (0, 1).

    Raises:
      ValueError: the text is not UTF-8, has more than 65536 different characters, or the fraction
        is out of range or leaves one of the parts empty.
    """
    try:
        characters = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text is not UTF-8 (byte {error.start}: {error.reason}); use bytes as tokens"
        ) from error
    occurs = np.bincount(characters, minlength=1) > 0
    vocab_size = int(occurs.sum())
    if vocab_size > 2**16:
        raise ValueError(f"{vocab_size} different characters, expected at most 65536")
    token_of = (np.cumsum(occurs) - 1).astype(np.uint8 if vocab_size <= 256 else np.uint16)
    return _split(token_of[characters], vocab_size, validation_fraction, "characters", text)


def load_bin(directory: str | Path, vocab_size: int = 50304) -> Tokens:
    """Returns nanoGPT's `train.bin` and `val.bin` (raw little-endian uint16), memory-mapped.

    Files of up to 256 MiB are checked and hashed whole, larger ones in 256 evenly spaced places.

    Args:
      directory: folder with the two files.
      vocab_size: all tokens must be smaller; 50304 is GPT-2's 50257 rounded up to a multiple of 64.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is empty, is not uint16, or holds a token >= `vocab_size`.
    """
    directory = Path(directory)
    parts, digest = [], hashlib.sha256()
    for name in ("train.bin", "val.bin"):
        tokens = _map_bin(directory / name)
        probe = _probe(tokens)
        if len(probe) >= 64 and not probe[1::2].any():
            raise ValueError(
                f"{directory / name}: every second token is 0, so this looks like 32-bit integers;"
                " expected uint16 (numpy: tokens.astype(np.uint16).tofile(...))"
            )
        if probe.max() >= vocab_size:
            raise ValueError(
                f"{directory / name} holds the token {probe.max()}, expected tokens below"
                f" vocab_size={vocab_size}; is the file uint16 and of this vocabulary?"
            )
        digest.update(f"{name} {len(tokens)} {vocab_size} ".encode())
        digest.update(probe.tobytes())
        parts.append(tokens)
    train, validation = parts
    return Tokens(
        train,
        validation,
        vocab_size=vocab_size,
        fingerprint=digest.hexdigest()[:16],
        source=f"{directory}: {len(train)} + {len(validation)} tokens",
    )


def token_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    block_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    fingerprint: str,
) -> BatchIterator:
    """Returns endless random blocks of a token array, with the next tokens as targets.

    The global batch depends on the seed and the batch's index alone; a process reads its rows of
    it, so several processes together see what one would, and a resume may change their number.

    Args:
      tokens: unsigned integers of shape (number of tokens,).
      batch_size: rows of the global batch.
      block_size: tokens in a row.
      seed: >= 0.
      process_index: 0 .. process_count - 1; this process gets the contiguous rows of that rank.
      process_count: divides the batch size.
      fingerprint: identifies the tokens (`Tokens.fingerprint`).

    Returns:
      Iterator over `{"inputs": ..., "targets": ...}`, both int32 of shape
      (batch_size / process_count, block_size); targets are the inputs moved on by one token.

    Raises:
      ValueError: there are too few tokens for a block and its target, or a size or the seed is
        out of range.
    """
    windows = _windows(tokens, block_size)
    rows = _process_rows(batch_size, process_index, process_count)
    random_generator(seed)  # a bad seed is reported here and not at the first batch

    def make_batch(index: int) -> Batch:
        offsets = random_generator(seed, index).integers(len(windows), size=batch_size)
        return _gather(windows, offsets[rows])

    return BatchIterator(
        make_batch,
        fingerprint=f"{fingerprint} batch={batch_size} block={block_size} seed={seed}",
    )


def evaluation_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    block_size: int,
    num_batches: int,
    process_index: int = 0,
    process_count: int = 1,
) -> list[Batch]:
    """Returns `num_batches` fixed batches whose blocks are spread evenly over the tokens.

    Args:
      tokens: unsigned integers of shape (number of tokens,).
      batch_size: rows of the global batch.
      block_size: tokens in a row.
      num_batches: number of batches.
      process_index: as in `token_batches`.
      process_count: as in `token_batches`.

    Returns:
      Batches as those of `token_batches`.

    Raises:
      ValueError: as in `token_batches`.
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}")
    windows = _windows(tokens, block_size)
    rows = _process_rows(batch_size, process_index, process_count)
    offsets = np.linspace(0, len(windows) - 1, num_batches * batch_size).astype(np.int64)
    return [_gather(windows, batch[rows]) for batch in offsets.reshape(num_batches, batch_size)]


def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    length: int,
    *,
    eos_id: int | None = None,
    pad_id: int = 0,
) -> Batch:
    """Returns rows of several documents each, which a model with segments reads one by one.

    Documents are placed in their order, each into the row that it leaves the least room in. One
    that is longer than a row is cut: a model takes its pieces for documents of their own, but the
    last token of a piece still has the first token of the next piece as its target.

    Args:
      documents: tokens of each, at least one.
      length: tokens in a row.
      eos_id: the target of a document's last token; it is never an input. None: there is no such
        target, and the last token has weight 0.
      pad_id: token and target where there is none.

    Returns:
      Arrays of shape (rows, length): int32 "tokens"; "targets", the next tokens of the same
      documents; "positions", which start from 0 in each document or piece; "segments", which
      number the documents of a row from 1, 0 being padding; and float32 "weights", 1 where there
      is a target and 0 elsewhere.

    Raises:
      ValueError: there are no documents, one is empty or not of tokens, or `length` is below 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not len(documents):
        raise ValueError("no documents to pack; give at least one")
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    room: list[tuple[int, int]] = []  # sorted pairs of free tokens and the row that has them
    for index, document in enumerate(documents):
        tokens = _checked_document(document, index)
        targets = tokens[1:] if eos_id is None else np.append(tokens[1:], eos_id)
        for start in range(0, len(tokens), length):
            piece = tokens[start : start + length], targets[start : start + length]
            found = bisect.bisect_left(room, (len(piece[0]), 0))
            if found == len(room):
                room.append((length, len(rows)))
                rows.append([])
            free, row = room.pop(found)
            rows[row].append(piece)
            if free > len(piece[0]):
                bisect.insort(room, (free - len(piece[0]), row))
    return _packed(rows, length, pad_id)


def _checked_document(document: Sequence[int] | np.ndarray, index: int) -> np.ndarray:
    tokens = np.asarray(document)
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(
            f"document {index} has shape {tokens.shape}; expected one or more tokens in one axis;"
            " leave out empty documents"
        )
    if tokens.dtype.kind not in "iu" or tokens.min() < 0:
        raise ValueError(
            f"document {index} is of {tokens.dtype} and its least entry {tokens.min()}; expected"
            " integers from 0 upwards"
        )
    return tokens


def _packed(
    rows: list[list[tuple[np.ndarray, np.ndarray]]], length: int, pad_id: int
) -> dict[str, np.ndarray]:
    shape = len(rows), length
    batch = {
        "tokens": np.full(shape, pad_id, np.int32),
        "targets": np.full(shape, pad_id, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }
    for row, pieces in enumerate(rows):
        start = 0
        for segment, (tokens, targets) in enumerate(pieces, 1):
            end = start + len(tokens)
            batch["tokens"][row, start:end] = tokens
            batch["targets"][row, start : start + len(targets)] = targets
            batch["positions"][row, start:end] = np.arange(len(tokens))
            batch["segments"][row, start:end] = segment
            batch["weights"][row, start : start + len(targets)] = 1
            start = end
    return batch


def _sorted_files(root: Path, left_out: Callable[[str], bool]) -> list[Path]:
    """The files below `root` by their path in it, without the names that are to be left out."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not left_out(name)]  # os.walk skips the others
        files += [Path(folder, name) for name in names if not left_out(name)]
    files = [path for path in files if path.is_file()]  # no dangling links, no sockets
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _split(
    tokens: np.ndarray, vocab_size: int, validation_fraction: float, kind: str, text: bytes
) -> Tokens:
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must lie in (0, 1), got {validation_fraction}")
    end = len(tokens) - round(validation_fraction * len(tokens))
    if not 0 < end < len(tokens):
        raise ValueError(
            f"{len(tokens)} tokens cannot be split into training and validation parts with"
            f" validation_fraction={validation_fraction}; give more text"
        )
    digest = hashlib.sha256(f"{kind} {end} ".encode())
    digest.update(text)
    return Tokens(
        tokens[:end],
        tokens[end:],
        vocab_size=vocab_size,
        fingerprint=digest.hexdigest()[:16],
        source=f"{kind}: {end} + {len(tokens) - end} tokens",
    )


def _map_bin(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found: expected a folder with train.bin and val.bin in nanoGPT's format"
            " (make them with its data/openwebtext/prepare.py, or write a uint16 array of tokens"
            " with numpy's tofile)"
        )
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty, expected uint16 tokens")
    if size % 2:
        raise ValueError(
            f"{path} has {size} bytes, an odd number: not uint16 tokens, or cut off;"
            " expected two bytes a token"
        )
    return np.memmap(path, np.dtype("<u2"), mode="r")


def _probe(tokens: np.ndarray) -> np.ndarray:
    if len(tokens) <= _PROBES * _PROBE_TOKENS:
        return np.asarray(tokens)
    starts = np.linspace(0, len(tokens) - _PROBE_TOKENS, _PROBES).astype(np.int64)
    # An even start keeps the two halves of a 32-bit integer where the caller looks for them.
    return np.concatenate([tokens[start : start + _PROBE_TOKENS] for start in starts & ~1])


def _windows(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """All blocks with the token that follows, as a view of shape (positions, block_size + 1)."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if len(tokens) <= block_size:
        raise ValueError(
            f"{len(tokens)} tokens are shorter than a block: block_size={block_size} needs at least"
            f" {block_size + 1}; give more text or a smaller block_size"
        )
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)


def _process_rows(batch_size: int, process_index: int, process_count: int) -> slice:
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must lie in 0 .. {process_count - 1}, got {process_index}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size must be a positive multiple of the number of processes ({process_count}),"
            f" got {batch_size}"
        )
    rows = batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def _gather(windows: np.ndarray, offsets: np.ndarray) -> Batch:
    blocks = windows[offsets].astype(np.int32)
    # Arrays of their own: a strided view would be copied once more on its way to a device.
    return {
        "inputs": np.ascontiguousarray(blocks[:, :-1]),
        "targets": np.ascontiguousarray(blocks[:, 1:]),
    }
