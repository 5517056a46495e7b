"""The tokenizer itself: ids of a text, text of ids, conversations."""

import codecs
import functools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from icmljax.language.tokenizer.common import guarded, import_tokenizers

SPACE = "▁"  # what SentencePiece writes for a space
_PROBE = "a b1"  # plain text, which every tokenizer has to give back
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A text tokenizer of a language model.

    Two kinds are supported, both BPE: byte-level (GPT-2, Llama 3, SmolLM) and SentencePiece with
    byte fallback (Llama 2). Control tokens, such as `<|im_end|>`, are the backend's special tokens.
    Its other added tokens are part of the text, and are read wherever they stand in it.

    Args:
      backend: a `tokenizers.Tokenizer`; kept, not copied, so do not change it afterwards.
      bos_id: the token that begins a text, or None.
      eos_ids: tokens that end what the model writes; may be empty.
      chat_template: Jinja template for `chat`, as Hugging Face's.
      add_bos: `encode` puts `bos_id` first.

    Attributes:
      bos_id: as given.
      eos_ids: as given.
      add_bos: as given.
      chat_template: as given.

    Raises:
      ImportError: the package tokenizers is missing.
      TypeError: an argument has the wrong type.
      ValueError: a tokenizer of another kind, or one that changes plain text; a vocabulary with
        gaps that it needs filled; an id that is not in the vocabulary; `add_bos` without `bos_id`,
        or with one that is no control token.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        chat_template: str | None = None,
        add_bos: bool = False,
    ):
        tokenizers = import_tokenizers()
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TypeError(
                f"backend is a {type(backend).__name__}, but has to be a tokenizers.Tokenizer;"
                " read files with from_gguf or from_json"
            )
        if not isinstance(chat_template, str | None):
            raise TypeError(f"chat_template is a {type(chat_template).__name__}, not a str or None")
        if backend.truncation or backend.padding:
            # Both change what was written; the caller's object stays as it is.
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        self._backend = backend
        self._byte_level, self._prefix = _kind(backend)
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._control = frozenset(i for i, token in added.items() if token.special)
        self._pieces, self._missing_bytes = self._read_vocabulary()

        self.bos_id = None if bos_id is None else self._checked_id(bos_id, "bos_id")
        self.eos_ids = tuple(self._checked_id(i, "eos_ids") for i in _as_list(eos_ids, "eos_ids"))
        self.chat_template = chat_template
        self.add_bos = bool(add_bos)
        if self.add_bos and self.bos_id is None:
            raise ValueError("add_bos is True, but bos_id is None; give the id of that token")
        if self.add_bos and self.bos_id not in self._control:
            raise ValueError(
                f"add_bos is True, but bos_id {self.bos_id} is no control token; give the id of one"
            )
        self._check_probe()

    @property
    def vocab_size(self) -> int:
        """Number of tokens: one more than the largest id."""
        return len(self._pieces)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
          text: any text.
          special: True gives control tokens that are written in the text, such as `<|im_end|>`,
            their ids. False spells them out like any other text: for text whose author is not to
            be trusted.

        Raises:
          TypeError: the text is not a str.
          ValueError: the text has half a surrogate pair, or a byte without a token (some
            vocabularies lack rare ones; leaving them out silently would change the text).
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, but has to be a str")
        self._check_text(text)
        backend = self._backend if special else self._plain_backend
        ids = guarded(
            lambda: backend.encode(text, add_special_tokens=False).ids, "the text cannot be encoded"
        )
        if not special and not self._control.isdisjoint(ids):
            token = self._token(next(i for i in ids if i in self._control))
            raise ValueError(
                f"the vocabulary reads plain text as the control token {token!r}; this tokenizer"
                " cannot be used with special=False"
            )
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode_bytes(self, ids: Iterable[SupportsIndex], *, special: bool = True) -> bytes:
        """Returns the bytes that ids stand for, UTF-8 or a part of it.

        `decode_bytes(encode(text))` is `text` in UTF-8, after BOS where that is added, as far as
        the tokenizer's own normalizer, and added tokens that strip spaces, leave the text alone.
        (SentencePiece reads "▁" as a space. Where it puts a space before the text, the first space
        of the ids, and the first after a control token, is left out here. Metaspace puts none
        before a text that has one, so that such a text loses it.)

        Args:
          ids: integers in 0 .. vocab_size - 1.
          special: False leaves control tokens out.

        Raises:
          TypeError: the ids are not integers.
          ValueError: an id is not in the vocabulary.
        """
        joiner = _Joiner(self, special)
        return b"".join([joiner.push(i) for i in _as_list(ids, "ids")])

    def decode(self, ids: Iterable[SupportsIndex], *, special: bool = True) -> str:
        """Returns the text of ids: `decode_bytes`, with U+FFFD for what is no UTF-8."""
        return self.decode_bytes(ids, special=special).decode("utf-8", errors="replace")

    def stream(self, *, special: bool = False) -> "TextStream":
        """Returns a decoder for ids that come one by one.

        Args:
          special: False leaves control tokens out.
        """
        return TextStream(self, special=special)

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of a conversation, written as the chat template says.

        A message cannot forge turns: one with a control token in it is rejected, and so is one with
        another added token that the template is written with. That does not cover templates that
        mark turns with ordinary text, such as `[INST]`.

        Args:
          messages: each a mapping of strings with at least "role" and "content".
          add_generation_prompt: ends with the beginning of the assistant's answer.

        Raises:
          ImportError: the package jinja2 is missing.
          TypeError: messages of the wrong type.
          ValueError: there is no template, no message, a message without role or content or with
            a control token in it, or the template fails.
        """
        template = self._template
        messages = _checked_messages(messages)
        for index, message in enumerate(messages):
            for key, value in message.items():
                self._check_untrusted(value, f"{key!r} of message {index}")
        text = guarded(
            lambda: template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token="" if self.bos_id is None else self._token(self.bos_id),
                eos_token=self._token(self.eos_ids[0]) if self.eos_ids else "",
                tools=None,
                documents=None,
            ),
            "the chat template rejects the messages",
        )
        self._check_text(text)
        # The template writes the first token itself.
        return self._backend.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _plain_backend(self):
        """The backend that spells control tokens out; a copy, so that calls can run in threads."""
        backend = import_tokenizers().Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def _template(self):
        source = self.chat_template
        if source is None:
            raise ValueError(
                "this tokenizer has no chat template; give one as chat_template, or write the"
                " prompt yourself and use encode"
            )
        try:
            import jinja2.sandbox
        except ImportError as error:
            raise ImportError(
                "chat templates need jinja2, which is missing: pip install 'icmljax[lm]'"
            ) from error

        def raise_exception(message):
            raise jinja2.exceptions.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = raise_exception
        return guarded(lambda: environment.from_string(source), "the chat template is not valid")

    @functools.cached_property
    def _reserved(self) -> frozenset[int]:
        """Tokens that the text of a message must not have."""
        template = self.chat_template or ""
        words = {i: self._token(i).strip() for i in self._added}
        return self._control.union(i for i, word in words.items() if word and word in template)

    def _token(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id)

    def _read_vocabulary(self) -> tuple[list[bytes | None], frozenset[int]]:
        """Returns what each id stands for (None: a gap), and bytes that have no token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("the vocabulary is empty; give a tokenizer with tokens")
        largest = max(vocabulary.values())
        if largest > 2 * len(vocabulary) + 1000:
            raise ValueError(
                f"the vocabulary has {len(vocabulary)} tokens, but ids up to {largest}; the file is"
                " damaged"
            )
        pieces: list[bytes | None] = [None] * (largest + 1)
        spell = _spell_byte_level if self._byte_level else _spell_fallback
        for token, token_id in vocabulary.items():
            if pieces[token_id] is not None:
                raise ValueError(f"two tokens, one of them {token!r}, have the id {token_id}")
            pieces[token_id] = spell(token)
            if token_id in self._added and pieces[token_id] != token.encode():
                pieces[token_id] = self._spell_added(token)
        if self._byte_level:
            alphabet = _byte_alphabet()
            return pieces, frozenset(b for b in range(256) if alphabet[b] not in vocabulary)
        needed = [SPACE, *(f"<0x{byte:02X}>" for byte in range(256))]
        missing = [token for token in needed if token not in vocabulary]
        if missing:
            raise ValueError(
                f"the vocabulary has no token {missing[0]!r}; byte fallback needs {SPACE!r} and all"
                f" of <0x00> ... <0xFF>, {len(missing)} of which are missing"
            )
        return pieces, frozenset()

    def _spell_added(self, token: str) -> bytes:
        """Returns the bytes of an added token with letters that stand for others in text."""
        parts = guarded(lambda: self._backend.model.tokenize(token), "the vocabulary is not valid")
        from_text = [part.value for part in parts] == [token]
        if not self._byte_level and from_text:
            return _spell_fallback(token)  # a run of spaces, as in Gemma
        if from_text or (not self._byte_level and _BYTE_TOKEN.fullmatch(token)):
            raise ValueError(
                f"the added token {token!r} also stands for other text; the file is damaged"
            )
        return token.encode()

    def _check_probe(self) -> None:
        """Raises a ValueError where plain text does not come back from its ids."""
        if not self._missing_bytes.isdisjoint(_PROBE.encode()):
            return  # `encode` says what is missing
        result = self.decode(self.encode(_PROBE), special=False)
        if result != _PROBE:
            raise ValueError(
                f"this tokenizer turns the text {_PROBE!r} into {result!r}; its normalizer or"
                " pre-tokenizer changes plain text (as add_prefix_space does), or the file is"
                " damaged"
            )

    def _checked_id(self, value: SupportsIndex, name: str) -> int:
        try:
            index = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name} has a {type(value).__name__} where an integer is expected"
            ) from None
        if not 0 <= index < len(self._pieces) or self._pieces[index] is None:
            raise ValueError(
                f"{name} has {index}, which is not in the vocabulary of {len(self._pieces)} tokens"
            )
        return index

    def _check_text(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a surrogate pair at position {error.start}; decode it with"
                " errors='replace' where it comes from"
            ) from None
        if self._missing_bytes.isdisjoint(data):
            return
        position, character = next(
            (position, character)
            for position, character in enumerate(text)
            if not self._missing_bytes.isdisjoint(character.encode())
        )
        raise ValueError(
            f"the vocabulary has no tokens for the character U+{ord(character):04X} at position"
            f" {position} of the text; remove or replace it"
        )

    def _check_untrusted(self, text: str, place: str) -> None:
        self._check_text(text)
        for i in self._backend.encode(text, add_special_tokens=False).ids:
            if i in self._reserved:
                raise ValueError(
                    f"{place} has the control token {self._token(i)!r}, which could forge a turn;"
                    " remove it, or write the prompt yourself and use encode"
                )


class TextStream:
    """Text of ids that come one by one; `Tokenizer.stream` makes one.

    What `push` and the last `flush` return is, put together, `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False):
        self._start = functools.partial(_Joiner, tokenizer, special)
        self._joiner = self._start()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: SupportsIndex) -> str:
        """Takes one id; returns the characters that are complete with it, often one word or "".

        Raises:
          TypeError: not an integer.
          ValueError: not in the vocabulary.
        """
        return self._decoder.decode(self._joiner.push(token_id))

    def flush(self) -> str:
        """Returns the rest, with U+FFFD for a character that is not complete, and starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._joiner = self._start()
        self._decoder.reset()
        return rest


class _Joiner:
    """Bytes of one id after the other, without the space that SentencePiece puts before a text."""

    def __init__(self, tokenizer: Tokenizer, special: bool):
        self._tokenizer = tokenizer
        self._special = special
        self._first = True
        self._at_start = tokenizer._prefix != "never"

    def push(self, token_id: SupportsIndex) -> bytes:
        tokenizer = self._tokenizer
        token_id = tokenizer._checked_id(token_id, "ids")
        piece = tokenizer._pieces[token_id] or b""
        if token_id in tokenizer._added:
            own_bos = self._first and tokenizer.add_bos and token_id == tokenizer.bos_id
            self._at_start = tokenizer._prefix == "every" or (
                tokenizer._prefix == "first" and own_bos
            )
            self._first = False
            return piece if self._special or token_id not in tokenizer._control else b""
        if self._at_start:
            piece = piece.removeprefix(b" ")
        self._at_start = self._first = False
        return piece


def _as_list(values: Any, name: str) -> list:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} is a {type(values).__name__}, but has to be a sequence of integers"
        )
    return list(values)


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(
            f"messages is a {type(messages).__name__}, but has to be a list of mappings"
        )
    messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {index} is a {type(message).__name__}, not a mapping")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"message {index} has no {key!r}; it has {[*message]}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise TypeError(
                    f"{key!r} of message {index} is a {type(value).__name__}, but has to be a str"
                )
    return [dict(message) for message in messages]


def _kind(backend: Any) -> tuple[bool, str]:
    """Returns whether a backend is byte-level, and where it puts a space before text.

    The latter is "never", "first" (the very beginning) or "every" (also after an added token).
    """
    model = type(backend.model).__name__
    if model == "BPE":
        affix = backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix
        if affix:
            raise ValueError(
                f"the tokens of this BPE tokenizer are marked with {affix!r}; supported are"
                " vocabularies without marks of words, such as those of GPT-2 and Llama"
            )
    normalizers = _parts(backend.normalizer)
    pre_tokenizers = _parts(backend.pre_tokenizer)
    decoders = {part["type"] for part in _parts(backend.decoder)}
    encoders = {part["type"] for part in [*normalizers, *pre_tokenizers]}
    if model == "BPE" and "ByteLevel" in encoders and "ByteLevel" in decoders:
        return True, "never"
    if model != "BPE" or not backend.model.byte_fallback or "ByteLevel" in encoders | decoders:
        raise ValueError(
            f"this is a {model} tokenizer whose pre-tokenizer and normalizer are"
            f" {sorted(encoders)} and whose decoder is {sorted(decoders)}; supported are byte-level"
            " BPE and BPE with byte fallback"
        )
    schemes = {part.get("prepend_scheme") for part in pre_tokenizers if part["type"] == "Metaspace"}
    prepends = any(part.get("prepend") for part in normalizers)
    if prepends or "always" in schemes:
        return False, "every"
    return False, "first" if "first" in schemes else "never"


def _parts(component: Any) -> list[dict[str, Any]]:
    """Returns the settings of a component, or of all that a sequence of them has."""

    def flat(state):
        for key in ("normalizers", "pretokenizers", "decoders"):
            if key in state:
                return [part for inner in state[key] for part in flat(inner)]
        return [state]

    return [] if component is None else flat(json.loads(component.__getstate__()))


@functools.cache
def _byte_alphabet() -> list[str]:
    """Returns the characters that GPT-2 writes for the bytes; visible ones are themselves."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + number) for number in range(256))
    return [chr(byte) if byte in visible else next(others) for byte in range(256)]


@functools.cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_byte_alphabet())}


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_byte_of_character().__getitem__, token))
    except KeyError:  # a token that no text gives, such as padding of the vocabulary
        return token.encode()


def _spell_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
