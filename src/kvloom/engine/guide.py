"""Guided decoding: which tokens a grammar allows next, by llguidance."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import thread_time
from typing import Any, Final, Protocol

import llguidance
import msgspec
import numpy as np

from kvloom.types.errors import BadRequest
from kvloom.types.geometry import U32
from kvloom.types.request import JSON_SPACING, Guide, ModelCard, StartGenerate

_BITS = 32
_NOTHING_FITS = "NoExtensionBias"  # as llguidance says it
_ANY_OBJECT = json.dumps({"type": "object"})
KEPT: Final = 32  # grammars of a unit that stay compiled
MOST_BYTES: Final = {"json": 0, "json_schema": 256 << 10, "lark": 256 << 10, "regex": 16 << 10}
MOST_DEPTH: Final = 100
MOST_RULES: Final = 2000
MOST_REPEATED: Final = 10_000
MOST_ALTERNATIVES: Final = 5000
MOST_CHAINED: Final = 50
_BRACKETS: Final = re.compile(r"[][(){}]")
_RULE: Final = re.compile(r"^\s*[?!]?\w+\s*(?:\.\s*-?\d+\s*)?:", re.MULTILINE)
_REPEATED: Final = re.compile(r"\{\s*(?:\d+\s*,\s*)?(\d+)\s*\}")
CREDIT_SECONDS: Final = 0.5
TOKEN_SECONDS: Final = 0.02
"""The CPU that a guide may take for each token, and a credit besides, because garbage may be collected
meanwhile. Tokens that take less save up nothing."""
RETRACE_SECONDS: Final = 0.05
"""The CPU that a guide takes at once for tokens that were made elsewhere, before another guide has its
turn."""
LIMITS: Final = llguidance.LLParserLimits(
    max_grammar_size=100_000,
    max_lexer_states=50_000,
    step_lexer_fuel=200_000,  # about 14 ms a mask
    step_max_items=50_000,  # about 2.5 ms a mask
    verbose_errors=False,
)


class GuideTrial(Protocol):
    """Tries a grammar in a process in which it can do no harm."""

    async def __call__(self, card: ModelCard, guide: Guide) -> None:
        """Raises BadRequest if the grammar cannot be used, or takes too much to compile."""


async def no_trial(card: ModelCard, guide: Guide) -> None:
    """Tries nothing."""


class GuideCompiler:
    """Compiles the grammars of one model. The tokenizer's trie is built at the first guided request; it takes
    up to a second."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer: llguidance.LLTokenizer | None = None

    def start(self, guide: Guide) -> GuideState:
        """Returns a state at the beginning of the grammar. Raises BadRequest if it cannot be used, or
        if no text fits it."""
        try:
            matcher = llguidance.LLMatcher(self.trie(), _grammar(guide), log_level=0, limits=LIMITS)
        except (ValueError, RecursionError) as error:
            raise refused(guide, str(error)) from None
        if matcher.is_error():
            raise refused(guide, matcher.get_error())
        state = GuideState(matcher, self._card.vocab_size, self._card.eos_token_ids)
        if not state.mask().any():
            why = matcher.get_error().partition("\n")[0] if matcher.is_error() else _NOTHING_FITS
            raise refused(guide, "no text fits it" if why == _NOTHING_FITS else why)
        return state

    def trie(self) -> llguidance.LLTokenizer:
        """Returns the model's tokens as a trie."""
        if self._tokenizer is None:
            # Its own copy of the vocabulary must not be wider than the tokenizer: masks are cut or padded
            # to the logits' width by GuideState.
            self._tokenizer = llguidance.LLTokenizer(
                self._card.tokenizer, eos_token=list(self._card.eos_token_ids) or None
            )
        return self._tokenizer


class Guides:
    """The grammars that a unit's requests have asked for. A grammar is tried first, and compiled once."""

    def __init__(self, cards: Mapping[str, ModelCard], trial: GuideTrial = no_trial) -> None:
        self._cards = cards
        self._trial = trial
        self._compilers = {name: GuideCompiler(card) for name, card in cards.items()}
        self._turns = {name: asyncio.Semaphore(1) for name in cards}
        self._retracing = {name: asyncio.Semaphore(1) for name in cards}
        self._work: set[asyncio.Task[GuideState | BadRequest]] = set()
        self._known: OrderedDict[bytes, GuideState | BadRequest] = OrderedDict()

    async def compiled(self, body: StartGenerate, wanted: Callable[[], bool]) -> list[GuideState | None]:
        """Returns a state for each choice, or None. The state has stepped over the choice's `made` tokens, or
        over as many as it takes. A large grammar takes a while, so a model's grammars are compiled one at a
        time, beside the loop; a request may not want its own any more when its turn comes. One that is known
        already waits for none of them. Raises BadRequest, and Unavailable if grammars cannot be tried now."""
        guide, nothing = body.sampling.guide, [None] * len(body.choices)
        if guide is None:
            return [*nothing]
        if (known := self._known.get(key := _key(body.model, guide))) is not None:
            self._known.move_to_end(key)
            return await self._retraced(_states(known, guide, len(nothing)), body, wanted)
        turn = self._turns[body.model]
        await turn.acquire()
        if not wanted():
            turn.release()
            return [*nothing]
        # A thread cannot be cancelled, so the turn ends with the work, and not with who waits for it.
        work = asyncio.create_task(self._compiled(body.model, guide))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        work.add_done_callback(lambda _: turn.release())
        states = _states(await asyncio.shield(work), guide, len(nothing))
        return await self._retraced(states, body, wanted)

    async def _retraced(
        self, states: list[GuideState], body: StartGenerate, wanted: Callable[[], bool]
    ) -> list[GuideState | None]:
        """Returns the states after they have stepped over the tokens that were made elsewhere. That runs
        beside the loop and in pieces, each of which waits for its turn, because many tokens may take a guide
        long."""
        for state, choice in zip(states, body.choices, strict=True):
            more = bool(choice.tokens)
            while more and wanted():
                async with self._retracing[body.model]:
                    more = await asyncio.to_thread(state.retrace, choice.tokens)
        return [*states]

    async def _compiled(self, model: str, guide: Guide) -> GuideState | BadRequest:
        """Returns the state at the grammar's beginning, which nobody may step, or the reason why there is
        none."""
        key = _key(model, guide)
        known = self._known.get(key)
        if known is None:
            try:
                await asyncio.to_thread(check_size, guide)
                await self._trial(self._cards[model], guide)
                known = await asyncio.to_thread(self._compilers[model].start, guide)
            except BadRequest as error:
                known = error
            self._known[key] = known
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known


def _key(model: str, guide: Guide) -> bytes:
    return hashlib.sha256(f"{model}\0{guide.kind}\0{guide.text}".encode()).digest()


def _states(known: GuideState | BadRequest, guide: Guide, count: int) -> list[GuideState]:
    """Returns so many states at the grammar's beginning, or raises the error that says why there is none."""
    if isinstance(known, BadRequest):
        raise BadRequest(known.message, param=guide.param)
    return known.copies(count)


def check_size(guide: Guide) -> None:
    """Raises BadRequest if the grammar is larger, or nested deeper, than any that is compiled."""
    most = MOST_BYTES[guide.kind]
    if len(guide.text) > most:
        raise refused(guide, f"it has {len(guide.text)} characters, and at most {most} are allowed")
    depth = deepest(guide.text)
    if depth > MOST_DEPTH:
        raise refused(guide, f"it is nested {depth} deep, and at most {MOST_DEPTH} is allowed")
    if guide.kind == "json_schema":
        with suppress(ValueError):  # the compiler says what is wrong
            _check_schema(guide, json.loads(guide.text))
    elif guide.kind == "lark" and (rules := len(_RULE.findall(guide.text))) > MOST_RULES:
        raise refused(guide, f"it has {rules} rules, and at most {MOST_RULES} are allowed")
    for bound in _REPEATED.findall(guide.text) if guide.kind != "json_schema" else ():
        if int(bound) > MOST_REPEATED:
            raise refused(guide, f"it repeats a part {bound} times, and at most {MOST_REPEATED} are allowed")


def deepest(text: str) -> int:
    """Returns how deep the text's brackets are nested, whichever they are and wherever they stand."""
    depth = most = 0
    for bracket in _BRACKETS.findall(text):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        most = max(most, depth)
    return most


def _check_schema(guide: Guide, schema: Any) -> None:
    """Raises BadRequest if a part has too many alternatives, or if its references are chained too far."""
    nodes = [schema] if isinstance(schema, dict | list) else []
    links: dict[str, str] = {}
    while nodes:
        node = nodes.pop()
        if len(node) > MOST_ALTERNATIVES:
            raise refused(
                guide, f"a part of it has {len(node)} entries, and at most {MOST_ALTERNATIVES} are allowed"
            )
        nodes += [
            one for one in (node.values() if isinstance(node, dict) else node) if isinstance(one, dict | list)
        ]
        for group in ("$defs", "definitions"):
            parts = node.get(group) if isinstance(node, dict) else None
            for name, part in parts.items() if isinstance(parts, dict) else ():
                if isinstance(part, dict) and isinstance(to := part.get("$ref"), str):
                    links[f"#/{group}/{name}"] = to
    for first in links:
        seen, at = 0, first
        while at in links and seen <= MOST_CHAINED:
            at, seen = links[at], seen + 1
        if seen > MOST_CHAINED:
            raise refused(guide, f"more than {MOST_CHAINED} of its references lead from one to the next")


@dataclass(slots=True)
class _Budget:
    """The work that the guide of one request has taken beyond what its tokens allow. The limits of the parser
    bound what one step keeps, and not what an ambiguous grammar makes of it, which grows with each token."""

    debt: float = 0.0  # seconds of CPU

    @property
    def is_over(self) -> bool:
        return self.debt > CREDIT_SECONDS

    def charge(self, seconds: float, tokens: int = 0) -> None:
        """Counts so much CPU, and so many tokens that were taken."""
        self.debt = max(0.0, self.debt + seconds - TOKEN_SECONDS * tokens)


class GuideState:
    """The state of one choice in its grammar. Each choice has its own state, but the choices of a request
    share one budget."""

    def __init__(
        self, matcher: Any, vocab_size: int, eos: tuple[int, ...], budget: _Budget | None = None
    ) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // _BITS)
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos if token < vocab_size)
        self._closed = False
        self.taken = 0
        """The tokens that it has stepped over."""
        self._budget = budget or _Budget()

    def copies(self, count: int) -> list[GuideState]:
        """Returns other states at the same place of the grammar, for the choices of one request."""
        budget = _Budget()
        return [
            GuideState(self._matcher.deep_copy(), self._vocab_size, self._eos, budget) for _ in range(count)
        ]

    @property
    def done(self) -> bool:
        """True once the grammar has ended, by an eos token or because nothing else can follow. A matcher
        that gave up, say over a grammar that grew too large, has not ended it."""
        return self._closed or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> U32:
        """Returns [ceil(vocab / 32)] words with a bit for each token, set if the token is allowed; an eos
        token is allowed exactly if the grammar may end. No bit is set only if the matcher gave up, or the
        grammar ended without an eos token. Safe on another thread while nobody steps."""
        begun = thread_time()
        mask = np.zeros(self._words, np.uint32)
        if not self._matcher.is_stopped():
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
            mask[: len(known)] = known
        self._keep_vocabulary(mask)
        allowed = self._may_end()
        for token in self._eos:
            bit = np.uint32(1 << token % _BITS)
            mask[token // _BITS] = mask[token // _BITS] | bit if allowed else mask[token // _BITS] & ~bit
        self._budget.charge(thread_time() - begun)
        return mask

    def accepts(self, token: int) -> bool:
        """Steps over a drawn token; eos ends the grammar. Returns False, and does not step, if the mask
        forbids the token, or if the guide has gone over its budget."""
        if token in self._eos and self._may_end():
            self._closed = True
            self.taken += 1
            return True
        if self.done or self._matcher.is_error() or self._budget.is_over:
            return False
        begun = thread_time()
        taken = int(self._matcher.try_consume_tokens([token]))
        self._budget.charge(thread_time() - begun, taken)
        self.taken += taken
        return taken == 1

    def retrace(self, tokens: Sequence[int]) -> bool:
        """Steps on over tokens that were made elsewhere, the first `taken` of which it has stepped over.
        Stops at one that it refuses, or after `RETRACE_SECONDS`. Returns whether it is to be called again.
        Safe on another thread while nobody else steps."""
        begun = thread_time()
        while self.taken < len(tokens) and self.accepts(tokens[self.taken]):
            if thread_time() - begun > RETRACE_SECONDS:
                return self.taken < len(tokens)
        return False

    @property
    def problem(self) -> str:
        """Returns why no token can follow, though the grammar has not ended; nothing if one can."""
        if self._budget.is_over:
            return f"its tokens take more work than is allowed, {1000 * TOKEN_SECONDS:g} ms each"
        if not self._matcher.is_error():
            return ""
        why = str(self._matcher.get_error()).partition("\n")[0]
        if why == _NOTHING_FITS:
            return "it allows no token here"
        return f"its next token takes more work than is allowed: {why}"

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


def refused(guide: Guide, message: str) -> BadRequest:
    """Returns the error that says why a grammar cannot be used."""
    said = " ".join(message.split())[:500]
    return BadRequest(f"the {guide.kind} grammar cannot be used: {said}", param=guide.param)


class GrammarTrials:
    """Compiles grammars in a sandbox's process, to see whether they can be used. Keys name the models."""

    def __init__(self) -> None:
        self._compilers: dict[str, GuideCompiler] = {}

    def prepare(self, key: str, data: bytes) -> None:
        """Takes a model's card, and builds its tokenizer's trie."""
        self._compilers[key] = compiler = GuideCompiler(msgspec.msgpack.decode(data, type=ModelCard))
        compiler.trie()

    def run(self, key: str, data: bytes) -> bytes:
        """Compiles a guide. Raises BadRequest."""
        self._compilers[key].start(msgspec.msgpack.decode(data, type=Guide))
        return b""
