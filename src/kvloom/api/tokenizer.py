"""A tokenizer without transformers: text to tokens, and what each token reads as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from math import prod
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as HFTokenizer

from kvloom.types.errors import BadRequest, ConfigError

PANIC: Final = "PanicException"
"""The name of what the binding raises if its library panics, say over a regex that takes too many steps. It
is no Exception, and cannot be imported."""


class Spelling(Enum):
    """The ways in which a vocabulary spells bytes."""

    BYTE_LEVEL = auto()  # in GPT-2's alphabet, in which every byte is a printable character
    SENTENCEPIECE = auto()  # with "▁" for a space, and <0xAB> for a byte
    OTHER = auto()  # as only its decoder knows


class _Spelled(dict[int, bytes]):
    """Tokens with their bytes, each spelled when it is first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        spelled = self[token] = self._spell(token)
        return spelled


class Tokenizer:
    """Encodes prompts and spells tokens. Safe to share between models, tasks and threads."""

    def __init__(self, text: str) -> None:
        """text: a JSON text of the package `tokenizers`. Raises ConfigError if it is none, or if its decoder
        may do more with a token than spell it."""
        try:
            self._hf = HFTokenizer.from_str(text)
        except BaseException as error:  # noqa: BLE001 -- the binding raises bare Exception
            _let_pass(error)
            raise ConfigError(f"its tokenizer cannot be read: {error}") from None
        self._hf.no_padding()
        self._hf.no_truncation()
        form = TokenizerForm.of(text)
        _check_decoder(form.decoder)
        self._spelling = _spelling(form.decoder)
        self.most_bytes = form.most_bytes()
        """The most bytes of a text that one token may stand for, or None if nothing bounds them."""
        self.plain = form.plain()
        """Whether encoding takes time and memory in proportion to the text, whatever the text is."""
        added = self._hf.get_added_tokens_decoder()
        self._added = {token: one.content.encode() for token, one in added.items()}
        self.added = frozenset(added)
        self.special = frozenset(token for token, one in added.items() if one.special)
        self.spelled = _Spelled(self._spell)
        """The text that each token adds, special tokens as they are written. Unknown ids add nothing."""

    def encode(self, text: str, *, special: bool, second: str = "") -> list[int]:
        """Returns the text's tokens. `special` adds what the tokenizer wants around plain text, which a chat
        template has added already. second: the text with which it is a pair. Raises BadRequest if the text
        cannot be encoded."""
        given = (text, second) if second else text
        try:
            # The batch call gives up the interpreter lock while it works, and `encode` does not.
            ids: list[int] = self._hf.encode_batch_fast([given], add_special_tokens=special)[0].ids
        except BaseException as error:  # noqa: BLE001
            _let_pass(error)
            if isinstance(error, TypeError):  # from the binding, which wants valid Unicode
                raise BadRequest("the text has half of a surrogate pair, which no tokenizer reads") from None
            raise BadRequest(f"the tokenizer cannot encode this text: {error}") from None
        return ids

    def unseen(self, text: str, ids: list[int]) -> int:
        """Returns how many of the first tokens `encode` has added, which is one or none."""
        first = ids[0]
        return int(first in self.special and not text.startswith(self.token_text(first)))

    def token_id(self, text: str) -> int | None:
        """Returns the token that is exactly this text, such as a chat marker."""
        found: int | None = self._hf.token_to_id(text)
        return found

    def token_word(self, token: int) -> str:
        """Returns the token as the vocabulary has it; empty for unknown ids."""
        word: str | None = self._hf.id_to_token(token)
        return word or ""

    def token_bytes(self, token: int) -> bytes:
        """Returns what the token adds to a text, special tokens as written. Unknown ids add nothing."""
        return self.spelled[token]

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: list[int], *, keep_special: bool = False) -> str:
        text: str = self._hf.decode(tokens, skip_special_tokens=not keep_special)
        return text

    @property
    def spells_bytes(self) -> bool:
        """Returns whether a text is its tokens' bytes, one after the other."""
        return self._spelling is not Spelling.OTHER

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        word = self._hf.id_to_token(token)
        if word is None:
            return b""
        if self._spelling is Spelling.BYTE_LEVEL:
            return _byte_level(word)
        if self._spelling is Spelling.SENTENCEPIECE:
            if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
                return bytes([int(word[3:5], 16)])
            return str(word).replace("▁", " ").encode()
        return self.decode([token], keep_special=True).encode()


def _let_pass(error: BaseException) -> None:
    """Raises what is neither an error nor a panic of the tokenizers' library."""
    if not isinstance(error, Exception) and type(error).__name__ != PANIC:
        raise error


Part = Mapping[str, Any]
MOST_PARTS: Final = 64 << 10  # bytes of a pipeline's JSON that is looked into
MOST_ADDED: Final = 64  # characters that a plain part may put in the place of others
_COMPOSING: Final = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_SHRINK: Final = 4
"""The most times by which `_COMPOSING` make a text's UTF-8 shorter. A character has at most 4 bytes, and
leaves one; of the compositions, Hangul's of three characters of 3 bytes each shrinks the most, to a third."""
_KEEPING: Final = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
_BEHAVING: Final = ("Split", "Punctuation")
_PLAIN: Final = frozenset((
    *_COMPOSING, *_KEEPING, "BertNormalizer", "BertPreTokenizer", "CharDelimiterSplit", "Prepend",
    "Punctuation", "Replace", "Sequence", "Split", "Strip", "StripAccents", "Whitespace", "WhitespaceSplit",
))  # fmt: skip
_DECODERS: Final = frozenset((
    "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip",
    "WordPiece",
))  # fmt: skip
KNOWN_REGEXES: Final = frozenset((
    # GPT-2's
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    # Llama 3's, and Qwen 2's, in which each digit stands alone
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    " {2,}",
    r"\s+",
))  # fmt: skip
"""Regexes of widely used tokenizers, whose time has been found to grow with the text's length."""


class _Added(msgspec.Struct, frozen=True):
    """A token that is looked for in the text itself."""

    content: str = ""
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, frozen=True):
    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TokenizerForm(msgspec.Struct, frozen=True):
    """Tells what a tokenizer's JSON text says of its parts, read without building them."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder_: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="decoder")
    added_tokens: list[_Added] = []
    model: _Model = _Model()

    @staticmethod
    def of(text: str) -> TokenizerForm:
        """Returns the form of a tokenizer that has been read. Raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=TokenizerForm)
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise ConfigError(f"its tokenizer cannot be read: {error}") from None

    @property
    def decoder(self) -> Part | None:
        found: Part | None = _small(self.decoder_, "decoder")
        return found

    def plain(self) -> bool:
        """Returns whether loading and encoding take time in proportion to vocabulary and text: there is
        no regex but known ones, and no part that puts long texts in the place of short ones."""
        try:
            pipeline = [_small(self.normalizer, "normalizer"), _small(self.pre_tokenizer, "pre-tokenizer")]
            _small(self.post_processor, "post-processor")
        except ConfigError:
            return False
        strips = any(one.lstrip or one.rstrip for one in self.added_tokens)  # looked for once for each token
        parts = [part for one in pipeline for part in _parts(one)]
        return self.model.type == "BPE" and not strips and all(map(_is_plain, parts))

    def most_bytes(self) -> int | None:
        """Returns the most bytes of UTF-8 that one token stands for, or None if nothing bounds them: a part
        may drop what it reads, or one token may stand for any text that is unknown."""
        try:
            normalizers = [*_parts(_small(self.normalizer, "normalizer"))]
            splits = [*_parts(_small(self.pre_tokenizer, "pre-tokenizer"))]
        except ConfigError:
            return None
        shrinks = [_shrink(part) for part in normalizers]
        kept = all(_keeps(part) for part in splits)
        if not kept or any(one.lstrip or one.rstrip for one in self.added_tokens):
            return None
        words = self._words()
        if not self._knows_all(words, splits):
            return None
        longest = max(len(word.encode()) for word in (*words, *(one.content for one in self.added_tokens)))
        return None if None in shrinks else longest * prod(one for one in shrinks if one is not None)

    def _words(self) -> list[str]:
        raw = bytes(self.model.vocab)
        try:
            if raw.lstrip()[:1] == b"{":
                return [*msgspec.json.decode(raw, type=dict[str, int])]
            return [word for word, _ in msgspec.json.decode(raw, type=list[tuple[str, float]])]
        except msgspec.MsgspecError:
            return []

    def _knows_all(self, words: list[str], splits: list[Part]) -> bool:
        """Returns whether every byte has a token, so that none is dropped or fused with others that are
        unknown."""
        affixes = self.model.continuing_subword_prefix or self.model.end_of_word_suffix
        if self.model.type not in ("BPE", "Unigram") or affixes:
            return False
        known = frozenset(words)
        if self.model.byte_fallback:
            return known.issuperset(f"<0x{byte:02X}>" for byte in range(256))
        levels = [part for part in splits if part["type"] == "ByteLevel"]
        return bool(levels) and known.issuperset(_BYTE_OF)


def _small(raw: msgspec.Raw, what: str) -> Any:
    """Returns a part of a tokenizer as JSON. Raises ConfigError if it is larger than any that is known."""
    if len(bytes(raw)) > MOST_PARTS:
        raise ConfigError(f"its tokenizer cannot be used: its {what} has more than {MOST_PARTS} bytes")
    return msgspec.json.decode(raw)


def _check_decoder(decoder: Part | None) -> None:
    """Raises ConfigError if the decoder may do more with a token than spell it. It runs for every token that
    is made, and in the gateway itself."""
    for part in _parts(decoder):
        kind = part.get("type")
        long = any(len(text) > MOST_ADDED for text in part.values() if isinstance(text, str))
        if kind not in _DECODERS or long or "Regex" in (part.get("pattern") or ()):
            raise ConfigError(f"its tokenizer cannot be used: its decoder has a {kind} that is not served")


def _is_plain(part: Part) -> bool:
    pattern = part.get("pattern") or {}
    added = [
        text for name in ("content", "prepend", "replacement") if isinstance(text := part.get(name), str)
    ]
    return (
        part.get("type") in _PLAIN
        and all(len(text) <= MOST_ADDED for text in added)
        and ("Regex" not in pattern or pattern["Regex"] in KNOWN_REGEXES)
        and pattern.get("String") != ""
    )


def _shrink(part: Part) -> int | None:
    """Returns by how many times a normaliser may make a text shorter in UTF-8; None if nothing bounds it."""
    kind, pattern = part.get("type"), part.get("pattern") or {}
    if kind in _COMPOSING:
        return _SHRINK
    if kind == "Replace" and "String" in pattern and part.get("content"):
        return max(1, -(-len(pattern["String"].encode()) // len(part["content"].encode())))
    return 1 if kind in ("Prepend", "ByteLevel", "Sequence") else None


def _keeps(part: Part) -> bool:
    """Returns whether a pre-tokenizer keeps all that it splits."""
    kind = part.get("type")
    return kind in ("Sequence", *_KEEPING) or (kind in _BEHAVING and part.get("behavior") != "Removed")


def _spelling(decoder: Part | None) -> Spelling:
    kinds = {part.get("type") for part in _parts(decoder)}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    return Spelling.OTHER


def _parts(part: Part | None) -> Iterator[Part]:
    """Returns a part of a pipeline, and those of which it is a sequence."""
    if part is not None:
        yield part
        for name in ("decoders", "normalizers", "pretokenizers"):
            for one in part.get(name, ()):
                yield from _parts(one)


def _alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level(word: str) -> bytes:
    try:
        return bytes([_BYTE_OF[letter] for letter in word])
    except KeyError:
        return word.encode()
