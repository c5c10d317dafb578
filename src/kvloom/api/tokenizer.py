"""A tokenizer without transformers: text to tokens, and what each token reads as."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from kvloom.types.errors import ConfigError

LONG_TEXT = 16_384  # characters from which encoding leaves the loop for a thread


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
        """text: a JSON text of the package `tokenizers`. Raises ConfigError if it is none."""
        try:
            self._hf = HFTokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 -- the binding raises bare Exception
            raise ConfigError(f"its tokenizer cannot be read: {error}") from None
        self._hf.no_padding()
        self._hf.no_truncation()
        self._spelling = _spelling(json.loads(text).get("decoder"))
        added = self._hf.get_added_tokens_decoder()
        self._added = {token: one.content.encode() for token, one in added.items()}
        self.added = frozenset(added)
        self.special = frozenset(token for token, one in added.items() if one.special)
        self.spelled = _Spelled(self._spell)
        """What each token adds to a text, special tokens as they are written. Unknown ids add nothing."""

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the text's tokens. `special` adds what the tokenizer wants around plain text, which a chat
        template has added already."""
        if len(text) < LONG_TEXT:
            await asyncio.sleep(0)  # Many short texts must not hold up the loop together.
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        # The batch call gives up the interpreter lock while it works, and `encode` does not.
        ids: list[int] = self._hf.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def unseen(self, text: str, ids: list[int]) -> int:
        """Returns how many of the first tokens `encode` has added, which is one or none."""
        first = ids[0]
        return int(first in self.special and not text.startswith(self.token_text(first)))

    def token_id(self, text: str) -> int | None:
        """Returns the token that is exactly this text, such as a chat marker."""
        found: int | None = self._hf.token_to_id(text)
        return found

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


def _spelling(decoder: dict[str, Any] | None) -> Spelling:
    kinds = {part.get("type") for part in _parts(decoder)}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    return Spelling.OTHER


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _parts(part)


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
