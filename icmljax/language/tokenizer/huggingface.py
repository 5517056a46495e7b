"""Tokenizers of Hugging Face folders."""

import collections
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from icmljax.language.tokenizer.common import (
    check_merges,
    guarded,
    import_tokenizers,
    is_a,
    one_line,
    split_merge,
)
from icmljax.language.tokenizer.core import Tokenizer


def from_json(path: str | os.PathLike) -> Tokenizer:
    """Reads a tokenizer in Hugging Face's form.

    The ids of BOS and EOS and the chat template come from the files beside it, where they are:
    EOS from `generation_config.json`, `tokenizer_config.json` or `config.json` (the first that has
    it), BOS from `tokenizer_config.json` or the other two, the template from `chat_template.jinja`
    or `tokenizer_config.json`. BOS is added where `add_bos_token` says so, or, where that is
    absent, the post-processor of the tokenizer.

    Args:
      path: `tokenizer.json`, or the folder that has it.

    Raises:
      ImportError: the package tokenizers is missing.
      FileNotFoundError: there is no such file.
      ValueError: a damaged file, or an unsupported tokenizer.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; give tokenizer.json or the folder that has it"
        )
    text = _read_text(path)
    _check_json_vocabulary(_read_json(path), path)
    backend = guarded(
        lambda: import_tokenizers().Tokenizer.from_str(text), f"{path} is not a valid tokenizer"
    )
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    files = {
        name: _read_json(path.parent / name) for name in names if (path.parent / name).is_file()
    }
    bos_ids = _special_ids(backend, files, names, "bos", path.parent)
    eos_ids = _special_ids(backend, files, (names[1], names[0], names[2]), "eos", path.parent)
    bos_id = bos_ids[0] if bos_ids else None
    add_bos = files.get(names[0], {}).get("add_bos_token")
    if not isinstance(add_bos, bool):
        start = guarded(
            lambda: backend.encode("").ids[:1], f"{path} has a post-processor that fails"
        )
        add_bos = bos_id is not None and start == [bos_id]
    template = _json_template(path.parent, files.get(names[0], {}))
    with _naming(path):
        return Tokenizer(
            backend,
            bos_id=bos_id,
            eos_ids=tuple(eos_ids),
            chat_template=template,
            add_bos=add_bos,
        )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Has a ValueError of a check that knows no files name this one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; get the file again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path), object_pairs_hook=_object)
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {one_line(error)}; get the file again"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, but has to hold an object")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} is there twice")
    return mapping


def _check_json_vocabulary(content: dict[str, Any], path: Path) -> None:
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{path} has no model; give the tokenizer.json of a tokenizer")
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"{path} has a model of type {model['type']!r}; supported is 'BPE'")
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise ValueError(f"{path} has a model without vocab or merges; get the file again")
    if not model.get("continuing_subword_prefix"):  # with one, `Tokenizer` says what is wrong
        with _naming(path):
            check_merges([split_merge(merge) for merge in merges], vocabulary)


def _special_ids(
    backend: Any, files: dict[str, dict], names: Sequence[str], which: str, folder: Path
) -> list[int]:
    """Returns the ids of BOS or EOS, of the first of the files that has them."""
    for name in names:
        key = f"{which}_token" if name == "tokenizer_config.json" else f"{which}_token_id"
        value = files.get(name, {}).get(key)
        if value is None:
            # Written down as null, it says that there is no BOS.
            if which == "bos" and key in files.get(name, {}):
                return []
            continue
        if isinstance(value, Mapping):
            value = value.get("content")
        ids: list[Any] = value if isinstance(value, list) else [value]
        if name == "tokenizer_config.json" and isinstance(value, str):
            ids = [backend.token_to_id(value)]
        if not ids or not all(is_a(i, int) for i in ids):
            raise ValueError(f"{folder / name}: {key} is {value!r}, which is not in the vocabulary")
        return ids
    return []


def _json_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = templates.get("default")
    if not isinstance(template, str | None):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}, but"
            " has to be a str or a list of named templates"
        )
    return template
