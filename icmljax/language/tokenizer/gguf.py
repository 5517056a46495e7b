"""Tokenizers of GGUF files."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from icmljax.language.tokenizer.common import (
    check_merges,
    guarded,
    import_tokenizers,
    is_a,
    split_merge,
)
from icmljax.language.tokenizer.core import SPACE, Tokenizer

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PRE_TOKENIZERS = ("smollm", "default", "gpt-2", "llama-bpe")


def from_gguf(source: str | os.PathLike | Mapping[str, Any]) -> Tokenizer:
    """Reads the tokenizer of a GGUF file.

    Supported are `tokenizer.ggml.model` "gpt2" with `tokenizer.ggml.pre` "smollm", "gpt-2",
    "default" or "llama-bpe", and "llama" (SentencePiece BPE). Merges of the latter are recovered
    from its scores.

    Args:
      source: path of the file, or its metadata: values by key, arrays as lists.

    Raises:
      ImportError: a package is missing.
      FileNotFoundError: there is no such file.
      TypeError: `source` is neither path nor mapping.
      ValueError: a damaged file, a missing or wrong value, or an unsupported tokenizer.
    """
    if isinstance(source, str | os.PathLike):
        from icmljax.language.weights import read_gguf_metadata

        source = read_gguf_metadata(source)
    if not isinstance(source, Mapping):
        raise TypeError(
            f"source is a {type(source).__name__}, but has to be the path of a GGUF file or a"
            " mapping of its metadata"
        )
    metadata = _Metadata(source)
    model = metadata.value("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE) and 'llama'"
            " (SentencePiece BPE)"
        )
    import_tokenizers()
    vocabulary = _unique(metadata.values("tokenizer.ggml.tokens", str))
    types = metadata.values("tokenizer.ggml.token_type", int, len(vocabulary))
    build = _byte_level_backend if model == "gpt2" else _sentencepiece_backend
    backend = build(metadata, vocabulary, types)
    _add_tokens(backend, vocabulary, types)
    # What llama.cpp takes where the file does not say.
    default_bos = 1 if model == "llama" else None
    default_add = model == "llama" or source.get("tokenizer.ggml.pre") == "llama-bpe"
    ends = (
        metadata.value(f"tokenizer.ggml.{name}_token_id", int, None)
        for name in ("eos", "eot", "eom")
    )
    bos_id = metadata.value("tokenizer.ggml.bos_token_id", int, default_bos)
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        chat_template=metadata.value("tokenizer.chat_template", str, None),
        add_bos=metadata.value("tokenizer.ggml.add_bos_token", bool, default_add),
    )


class _Metadata:
    """Checked access to the metadata of a GGUF file."""

    _REQUIRED = object()

    def __init__(self, mapping: Mapping[str, Any]):
        self._mapping = mapping

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        if key not in self._mapping and default is not self._REQUIRED:
            return default
        value = self._get(key)
        if not is_a(value, kind):
            raise ValueError(f"{key} is a {type(value).__name__}, but has to be a {kind.__name__}")
        return value

    def values(self, key: str, kind: type, length: int | None = None) -> list:
        values = self._get(key)
        if not isinstance(values, list | tuple) or not all(is_a(v, kind) for v in values):
            raise ValueError(f"{key} has to be a list of {kind.__name__}, but is something else")
        if length is not None and len(values) != length:
            raise ValueError(
                f"{key} has {len(values)} values for {length} tokens; the file is damaged"
            )
        return list(values)

    def _get(self, key: str) -> Any:
        if key not in self._mapping:
            raise ValueError(
                f"the metadata has no {key}; give a GGUF file that holds a tokenizer, and convert"
                " the model again if it does not"
            )
        return self._mapping[key]


def _unique(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token in vocabulary:
            raise ValueError(
                f"the token {token!r} is in the vocabulary twice, as {vocabulary[token]} and"
                f" {index}; the file is damaged"
            )
        vocabulary[token] = index
    return vocabulary


def _byte_level_backend(metadata: _Metadata, vocabulary: dict[str, int], types: list[int]):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.value("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [split_merge(text) for text in metadata.values("tokenizer.ggml.merges", str)]
    check_merges(merges, vocabulary)
    llama3 = pre == "llama-bpe"
    backend = guarded(
        lambda: Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3)),
        "the vocabulary is not valid",
    )
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama3)
    first: Any = None
    if llama3:
        first = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
    elif pre == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = words if first is None else pre_tokenizers.Sequence([first, words])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(metadata: _Metadata, vocabulary: dict[str, int], types: list[int]):
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.values("tokenizer.ggml.scores", float, len(vocabulary))
    if any(map(math.isnan, scores)):
        raise ValueError(
            "tokenizer.ggml.scores has values that are no numbers; the file is damaged"
        )
    prefix = metadata.value("tokenizer.ggml.add_space_prefix", bool, True)
    merges = _merges_of_scores(vocabulary, scores, types)
    backend = guarded(
        lambda: Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True)),
        "the vocabulary is not valid",
    )
    spaces: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_of_scores(
    vocabulary: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Returns every way to make a token of two, the token with the highest score first.

    Only ordinary tokens take part: text must not grow into control tokens or bytes. Of equal scores
    the lower id goes first; llama.cpp takes the pair on the left.
    """
    ordinary = {token for token, index in vocabulary.items() if types[index] == _NORMAL}
    ranked = sorted(ordinary, key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in ordinary and token[cut:] in ordinary
    ]


def _add_tokens(backend: Any, vocabulary: dict[str, int], types: list[int]) -> None:
    from tokenizers import AddedToken

    def added(*kinds):
        return [
            AddedToken(token, normalized=False, special=_USER_DEFINED not in kinds)
            for token, index in vocabulary.items()
            if types[index] in kinds
        ]

    backend.add_special_tokens(added(_CONTROL, _UNKNOWN))
    backend.add_tokens(added(_USER_DEFINED))
