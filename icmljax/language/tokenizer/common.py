"""Checks that the readers of tokenizers share."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any


def import_tokenizers() -> Any:
    """Returns the package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("the package tokenizers is missing: pip install 'icmljax[lm]'") from error
    return tokenizers


def guarded(function: Callable[[], Any], complaint: str) -> Any:
    """Calls a function of a library that raises anything; errors become ValueErrors of one line."""
    try:
        return function()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise ValueError(f"{complaint}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_a(value: Any, kind: type) -> bool:
    """Returns whether a value is of a type; a bool is no int here."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def split_merge(merge: Any) -> tuple[str, str]:
    """Returns the two tokens of a merge, written as "a b" or as ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not all(map(_is_text, parts)):
        raise ValueError(
            f"a merge is {reprlib.repr(merge)}, but has to be two tokens with one space between"
        )
    return parts[0], parts[1]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def check_merges(merges: list[tuple[str, str]], vocabulary: Mapping[str, int]) -> None:
    """Raises a ValueError where a merge needs a token that is not in the vocabulary."""
    for rank, (left, right) in enumerate(merges):
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ValueError(
                    f"merge {rank}, {left!r} + {right!r}, needs the token {token!r}, which is not"
                    " in the vocabulary; the file is damaged"
                )
