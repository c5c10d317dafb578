"""Guided decoding: which tokens a grammar allows next, by llguidance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import numpy as np

from kvloom.types.errors import BadRequest
from kvloom.types.geometry import U32
from kvloom.types.request import JSON_SPACING, Guide, ModelCard, StartGenerate

_BITS = 32
_ANY_OBJECT = json.dumps({"type": "object"})


class GuideCompiler:
    """Compiles the grammars of one model. The tokenizer's trie is built at the first guided request; it takes
    up to a second."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer: llguidance.LLTokenizer | None = None

    def start(self, guide: Guide, choices: int = 1) -> list[GuideState]:
        """Returns a state at the beginning of the grammar for each choice. Raises BadRequest if the grammar
        cannot be used."""
        try:
            matcher = llguidance.LLMatcher(self._trie(), _grammar(guide), log_level=0)
        except ValueError as error:
            raise _refused(guide, str(error)) from None
        if matcher.is_error():
            raise _refused(guide, matcher.get_error())
        copies = [matcher, *(matcher.deep_copy() for _ in range(choices - 1))]
        return [GuideState(copy, self._card.vocab_size, self._card.eos_token_ids) for copy in copies]

    def _trie(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            # Its own copy of the vocabulary must not be wider than the tokenizer: masks are cut or padded
            # to the logits' width by GuideState.
            self._tokenizer = llguidance.LLTokenizer(
                self._card.tokenizer, eos_token=list(self._card.eos_token_ids) or None
            )
        return self._tokenizer


class Guides:
    """A unit's compilers, by model."""

    def __init__(self, cards: Mapping[str, ModelCard]) -> None:
        self._compilers = {name: GuideCompiler(card) for name, card in cards.items()}
        self._turn = asyncio.Semaphore(1)

    async def compiled(self, body: StartGenerate, wanted: Callable[[], bool]) -> list[GuideState | None]:
        """Returns a state for each choice, or None. A large grammar takes a while, so grammars are compiled
        one at a time, beside the loop; a request may not want its own any more when its turn comes. Raises
        BadRequest."""
        guide, count = body.sampling.guide, len(body.choices)
        nothing = [None] * count
        if guide is None:
            return [*nothing]
        async with self._turn:
            if not wanted():
                return [*nothing]
            return [*await asyncio.to_thread(self._compilers[body.model].start, guide, count)]


class GuideState:
    """The state of one choice in its grammar. Choices do not share one."""

    def __init__(self, matcher: Any, vocab_size: int, eos: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // _BITS)
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos if token < vocab_size)
        self._closed = False

    @property
    def done(self) -> bool:
        """True once the grammar has ended, by an eos token or because nothing else can follow. A matcher
        that gave up, say over a grammar that grew too large, has not ended it."""
        return self._closed or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> U32:
        """Returns [ceil(vocab / 32)] words with a bit for each token, set if the token is allowed; an eos
        token is allowed exactly if the grammar may end. No bit is set only if the matcher gave up, or the
        grammar ended without an eos token. Safe on another thread while nobody steps."""
        mask = np.zeros(self._words, np.uint32)
        if not self._matcher.is_stopped():
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
            mask[: len(known)] = known
        self._keep_vocabulary(mask)
        allowed = self._may_end()
        for token in self._eos:
            bit = np.uint32(1 << token % _BITS)
            mask[token // _BITS] = mask[token // _BITS] | bit if allowed else mask[token // _BITS] & ~bit
        return mask

    def accepts(self, token: int) -> bool:
        """Steps over a drawn token; eos ends the grammar. Returns False, and does not step, if the mask
        forbids the token."""
        if token in self._eos and self._may_end():
            self._closed = True
            return True
        if self.done or self._matcher.is_error():
            return False
        return bool(self._matcher.consume_token(token))

    def _may_end(self) -> bool:
        return bool(self.done or (self._matcher.is_accepting() and not self._matcher.is_error()))

    def _keep_vocabulary(self, mask: U32) -> None:
        spare = self._words * _BITS - self._vocab_size
        if spare:
            mask[-1] &= np.uint32(0xFFFFFFFF >> spare)


def _grammar(guide: Guide) -> str:
    make = llguidance.LLMatcher
    if guide.kind in ("json", "json_schema"):
        schema = _ANY_OBJECT if guide.kind == "json" else guide.text
        return str(make.grammar_from_json_schema(schema, defaults=JSON_SPACING))
    if guide.kind == "regex":
        return str(make.grammar_from_regex(guide.text))
    return str(make.grammar_from_lark(guide.text))


def _refused(guide: Guide, message: str) -> BadRequest:
    said = " ".join(message.split())[:500]
    return BadRequest(f"the {guide.kind} grammar cannot be used: {said}", param=guide.param)
