"""A sequence: one choice of a request, from its prompt to its last token."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvloom.engine.drafts.drafting import DraftState
from kvloom.engine.guide import GuideState
from kvloom.types.geometry import I64
from kvloom.types.job import PromptRow, SampleRow
from kvloom.types.request import SamplingParams, TokenLogprob
from kvloom.types.transfer import Transfer

_ROOM = 16


class TokenBuffer:
    """A sequence's tokens. The buffer only grows, and no token is ever replaced. So `prompt`, `output` and
    slices are views that stay true whatever is appended later, and a job's thread may read them meanwhile.
    """

    __slots__ = ("_room", "asked", "length", "made", "prompt")

    def __init__(self, prompt: I64, output: abc.Sequence[int] = ()) -> None:
        self.prompt = prompt
        self.asked = int(prompt.size)  # tokens of the prompt
        self.made = len(output)  # tokens of the output
        self.length = self.asked + self.made
        self._room = np.array(output, dtype=np.int64)

    @property
    def output(self) -> I64:
        return self._room[: self.made]

    def append(self, token: int) -> None:
        if self.made == self._room.size:
            self._grow(1)
        self._room[self.made] = token
        self.made += 1
        self.length += 1

    def extend(self, tokens: abc.Sequence[int]) -> None:
        if self.made + len(tokens) > self._room.size:
            self._grow(len(tokens))
        self._room[self.made : self.made + len(tokens)] = tokens
        self.made += len(tokens)
        self.length += len(tokens)

    def _grow(self, count: int) -> None:
        room = np.empty(max(_ROOM, 2 * (self.made + count - 1)), dtype=np.int64)
        room[: self.made] = self._room[: self.made]
        self._room = room

    def list(self) -> list[int]:
        """Returns a copy of all tokens."""
        return [*self.prompt.tolist(), *self.output.tolist()]

    def between(self, start: int, end: int) -> I64:
        """Returns the tokens [start, end), counted from the prompt's first."""
        length = self.asked
        if start >= length:
            return self._room[start - length : end - length]
        if end <= length:
            return self.prompt[start:end]
        return np.concatenate((self.prompt[start:], self._room[: end - length]))


StreamId = str | int  # the caller's for a request, a number for a send

_CHOICE_STRIDE = 0xD1B54A32D192ED03  # odd, so that a seed's choices have keys of their own


class Status(Enum):
    """The states of a sequence in the engine."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks, or is in a job that takes them
    HELD = "held"  # holds no blocks and is not to be run: it stands still for a move
    UNREAD = "unread"  # holds no blocks and is not to be run: its caller does not take its tokens
    ENDED = "ended"


_LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.WAITING),
    (Status.RUNNING, Status.ENDED),
    (Status.WAITING, Status.ENDED),
    (Status.RUNNING, Status.HELD),
    (Status.WAITING, Status.HELD),
    (Status.RUNNING, Status.UNREAD),
    (Status.WAITING, Status.UNREAD),
    (Status.UNREAD, Status.WAITING),
    (Status.UNREAD, Status.HELD),
    (Status.UNREAD, Status.ENDED),
    (Status.HELD, Status.WAITING),
    (Status.HELD, Status.ENDED),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request; [0, computed) of its tokens have K and V in the cache."""

    id: int
    model: str
    request: StreamId
    choice: int
    order: tuple[int, int, int]
    """(priority, arrival, choice): the smaller goes first and is preempted last."""
    sampling: SamplingParams
    tokens: TokenBuffer
    prompt_logprobs: list[TokenLogprob]
    """The prompt's log-probabilities that are known so far, in one list for all choices."""
    guide: GuideState | None = None
    transfer: Transfer | None = None
    """The transfer of its K and V to a peer, if there is one."""
    tenant: str = ""
    """The tenant for whom the request is made."""
    foreign: range = range(0)
    """Tokens that a peer has sent here; if this sequence sends, tokens that its peer has already."""
    siblings: list[Sequence] = field(default_factory=list)
    """Choices that fork off this one when its prompt has been computed."""
    computed: int = 0
    cached: int | None = None
    """Tokens of the prompt that needed no computing when the sequence was first admitted."""
    in_job: bool = False
    over: bool = False
    """Its end has been told, or is about to be: no token of it counts any more. Its blocks come back now, or
    with its job."""
    waiting_since: int = 0
    """Jobs that the unit had started when the sequence began to wait."""
    queued_at: float = 0.0
    """The clock's time when the sequence began to wait."""
    preempted_at: int = -1
    """Jobs that the unit had started when the sequence was last preempted."""
    came: float | None = None
    """The clock's time when it was first enqueued."""
    new_here: bool = False
    """It has been admitted, and no job with it has begun since."""
    first_at: float | None = None
    """The clock's time of its first token."""
    found: int = 0
    """Tokens that were found cached when it was last looked, while the sequence waited."""
    missed: bool = False
    """Whether it cannot meet its model's objective any more, as far as is known."""
    status: Status = Status.WAITING
    salt: str = ""
    """The salt with which its tokens are cached."""
    draft_state: DraftState | None = None
    """The state of its drafts; None before the first are looked for."""
    pair: int = 0
    """The position from which its tokens are the second text of a pair; 0 if it is none."""
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.sampling.seed + self.choice * _CHOICE_STRIDE) % 2**64

    def become(self, status: Status) -> None:
        """Changes the status. Raises ValueError if that is illegal from the present one."""
        if (self.status, status) not in _LEGAL:
            raise ValueError(f"sequence {self.id}: {self.status.value} cannot become {status.value}")
        self.status = status

    @property
    def prompt_length(self) -> int:
        return self.tokens.asked

    @property
    def pending(self) -> int:
        """Tokens that have no K and V yet."""
        return self.tokens.length - self.computed

    @property
    def decodes(self) -> bool:
        """True if the next forward is a decode step."""
        tokens = self.tokens
        return tokens.length - self.computed == 1 and tokens.made > 0

    @property
    def untouched(self) -> bool:
        """True if nothing of it was ever computed, here or elsewhere."""
        return self.cached is None and not self.output_length and not self.foreign

    @property
    def draws(self) -> bool:
        """False if nothing but the prompt's K and V is wanted."""
        return self.sampling.max_tokens > 0

    @property
    def cacheable(self) -> int:
        """Tokens that may come from the cache: all but the last, whose logits are needed, and only those
        whose log-probabilities are known if they are asked for."""
        known, wanted = len(self.prompt_logprobs), self.prompt_length - 1
        if self.sampling.prompt_logprobs is not None and known < wanted:
            return known
        return self.tokens.length - 1

    @property
    def prefix(self) -> list[int]:
        """Returns the tokens that may come from the cache, and the one after them, which fills a page."""
        return self.tokens.list()[: self.cacheable + 1]

    def adopted(self, tokens: int) -> None:
        """Notes that the sequence begins with `tokens` tokens of the cache."""
        self.computed, self.new_here = tokens, True
        if self.cached is None:
            self.cached = min(tokens, self.prompt_length)

    @property
    def hits(self) -> int:
        """Tokens that this unit's cache spares the sequence, which has just been admitted."""
        return self.computed - len(range(self.foreign.start, min(self.foreign.stop, self.computed)))

    @property
    def output_length(self) -> int:
        return self.tokens.made

    def sample_row(self, row: int) -> SampleRow:
        """Returns the draw of the sequence's next token after the forward's token `row`."""
        return SampleRow(
            row,
            self.key,
            self.output_length,
            self.sampling,
            self.tokens.prompt,
            self.tokens.output,
            self.guide.mask if self.guide else None,
        )

    def draft_rows(self, row: int, drafts: I64) -> list[SampleRow]:
        """Returns the draws after the forward's token `row` and after each of the drafts [k], which follow
        it, as if those before it were the sequence's. It has no guide."""
        made, output = self.output_length, np.concatenate((self.tokens.output, drafts))
        return [
            SampleRow(row + i, self.key, made + i, self.sampling, self.tokens.prompt, output[: made + i])
            for i in range(len(drafts) + 1)
        ]

    def prompt_rows(self, count: int, row: int) -> list[PromptRow]:
        """Returns the prompt's tokens whose log-probability the next `count` tokens, from the forward's token
        `row` on, give for the first time."""
        top = self.sampling.prompt_logprobs
        if top is None:
            return []
        first = max(self.computed, len(self.prompt_logprobs))
        last = min(self.computed + count, self.prompt_length - 1)
        follow = self.tokens.prompt[first + 1 : last + 1].tolist()
        return [PromptRow(row + at - self.computed, token, top) for at, token in enumerate(follow, first)]

    def max_steps(self, limit: int, *, step_by_step: bool) -> int:
        """Returns the number of tokens that it may take in one job; 1 if each draw depends on the token
        before it.

        limit: tokens of the longest sequence. step_by_step: each token is known as it comes, so that one may
        end the sequence; else it takes them whatever they are.
        """
        sampling = self.sampling
        bent = sampling.guide or sampling.penalised or sampling.logit_bias or sampling.min_tokens
        ends = sampling.stop_token_ids and not step_by_step
        if bent or ends or sampling.logprobs is not None or self.transfer:
            return 1
        room = limit - self.tokens.length
        return room if step_by_step else min(self.remaining, room)

    @property
    def remaining(self) -> int:
        """Tokens that it may still make."""
        return self.sampling.max_tokens - self.output_length
