"""Pages that really hold numbers, and tokens that are a hash of what lies in them. So it shows at once if a
page was given away too early, copied too late, or read by somebody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from kvloom.lab.faults.guides import begin_guide
from kvloom.types.geometry import I32, I64, U32, AnyArray, Geometry
from kvloom.types.job import ForwardPlan, Job
from kvloom.types.request import SamplingParams, StartGenerate

EMPTY: Final = -1
_TOKENS = 10_000  # a number's last four digits are a token id, those before them a position
_CHOICES = 0xD1B54A32D192ED03  # between the keys of a request's choices


def digest(*words: object) -> int:
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "big")


def next_token(
    model: str,
    tokens: Sequence[int],
    key: int,
    index: int,
    params: SamplingParams,
    vocab: int,
    mask: U32 | None = None,
) -> int:
    """Returns what `model` says after `tokens`; (key, index) draw it if it is not greedy. `mask` is that of
    the tokens that a guide allows."""
    drawn = digest(model, list(tokens), (key, index) if params.temperature else ())
    few = params.stop_token_ids and index < params.min_tokens
    if mask is None and not few:
        return drawn % vocab
    allowed = range(vocab) if mask is None else np.flatnonzero(_bits(mask)).tolist()
    longer = [token for token in allowed if token not in params.stop_token_ids] if few else []
    choice = longer or allowed or range(vocab)
    return choice[drawn % len(choice)]


def _bits(mask: U32) -> AnyArray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def lone_answer(body: StartGenerate, choice: int, *, context: int, vocab: int) -> list[int]:
    """Returns the tokens of one choice, worked out without an engine. `context` is the number of tokens that
    the model holds in all."""
    sampling = body.sampling
    key, tokens = (sampling.seed + choice * _CHOICES) % 2**64, list(body.prompt)
    guide = begin_guide(sampling.guide, vocab) if sampling.guide else None
    for index in range(min(sampling.max_tokens, context - len(body.prompt))):
        mask = guide.mask() if guide else None
        tokens.append(next_token(body.model, tokens, key, index, sampling, vocab, mask))
        if tokens[-1] in sampling.stop_token_ids:
            break
        if guide and (not guide.accepts(tokens[-1]) or guide.done):
            break
    return tokens[len(body.prompt) :]


class LentArena:
    """The blocks of a loan in its lender's arena, by their numbers in the loan."""

    def __init__(self, arena: AnyArray, blocks: I32) -> None:
        self._arena = arena
        self._blocks = blocks

    def __getitem__(self, at: Any) -> AnyArray:
        found: AnyArray = self._arena[(self._blocks[at[0]], *at[1:])]
        return found

    def __setitem__(self, at: Any, numbers: AnyArray) -> None:
        self._arena[(self._blocks[at[0]], *at[1:])] = numbers


class InvariantChecker:
    """Satisfies `Content`. One number stands for K and V of a token in one head of one layer; it says whose
    model, layer, head, position and token it is. A job's steps are one, because the second step of a job
    reads tokens that only the executor knows: run it with `max_steps` of 1.

    arena: [blocks, tokens of the largest block]. wrong: gathers what was not where it should be. Token ids
    and positions are less than 10,000.
    """

    def __init__(
        self, geometries: Mapping[str, Geometry], blocks: int, vocab: int, *, width: int = 0
    ) -> None:
        """`width` is the tokens of a block of the arena, if models of other units use it too."""
        self.geometries = geometries
        self.vocab = vocab
        width = max(width, *(one.tokens_per_block for one in geometries.values()))
        self.arena: AnyArray = np.full((blocks, width), EMPTY, dtype=np.int64)
        self.wrong: list[str] = []
        self._places = {model: _places(model, geometry) for model, geometry in geometries.items()}

    def begin(self, job: Job) -> None:
        plan = job.plan
        for copy in plan.copies:
            source, target = plan.page_map[copy.source], plan.page_map[copy.target]
            self.arena[target, : copy.tokens] = self.arena[source, : copy.tokens]
            self.arena[target, copy.tokens :] = EMPTY

    def write(self, job: Job, layers: range) -> None:
        plan, part = job.plan, slice(layers.start, layers.stop)
        numbers = self.numbers(plan.model, plan.positions, job.tokens)[:, part]
        self.arena[plan.page_map[plan.slot_page, part], plan.slot_offset[:, None, None]] = numbers

    def draw(self, job: Job, step: int) -> list[int]:
        if step:
            self.wrong.append(f"{job.model}: a job takes step {step + 1}; only the first is understood")
        read = self.read(job)
        for sample in job.samples:
            known = [*sample.prompt.tolist(), *sample.output.tolist()]
            if known != read[sample.row] or sample.index != sample.output.size:
                self.wrong.append(f"{job.model}: a draw is told of tokens that are not its own")
        return [
            next_token(
                job.model,
                read[one.row],
                one.key,
                one.index,
                one.params,
                self.vocab,
                one.allowed() if one.allowed else None,
            )
            for one in job.samples
        ]

    def read(self, job: Job) -> list[list[int]]:
        """Returns for each token of the job all tokens up to it, as the pages hold them."""
        plan, read, begin = job.plan, list[list[int]](), 0
        for i, (start, new) in enumerate(zip(plan.starts.tolist(), plan.appends.tolist(), strict=True)):
            history = self._history(plan, i, start + new)
            if history[start:] != job.tokens[begin : begin + new].tolist():
                self.wrong.append(f"{job.model}: sequence {plan.sequences[i]} lost what it wrote")
            read += [history[: start + j + 1] for j in range(new)]
            begin += new
        return read

    def forget(self, blocks: I32) -> None:
        """Empties blocks that have lost what they held."""
        self.arena[blocks] = EMPTY

    def offloaded(self, arena: LentArena) -> InvariantChecker:
        """Returns a checker of what lies in a loan's blocks, which gathers what is wrong here."""
        made = shallow_copy(self)
        made.arena = arena  # type: ignore[assignment]
        return made

    def move(self, job: Job, away: InvariantChecker) -> None:
        """Makes the copies that come before an offloaded step."""
        assert job.offloaded is not None
        for move in job.offloaded.moves:
            here = job.plan.page_map[move.home], self.arena
            there = job.offloaded.plan.page_map[move.lent], away.arena
            (pages, source), (others, target) = (here, there) if move.out else (there, here)
            for own, other, tokens in zip(pages, others, move.tokens, strict=True):
                numbers = source[own, :tokens]
                target[other, :] = EMPTY
                target[other, :tokens] = numbers

    def _history(self, plan: ForwardPlan, i: int, length: int) -> list[int]:
        """Returns the tokens of sequence i as its pages hold them, the same in all layers and heads."""
        positions = np.arange(length, dtype=np.int64)
        width = self.geometries[plan.model].tokens_per_block
        blocks = plan.page_map[plan.tables[i, positions // width]]
        found = self.arena[blocks, (positions % width)[:, None, None]]
        tokens: I64 = found[:, 0, 0] % _TOKENS
        if not (found == self.numbers(plan.model, positions, tokens)).all():
            self.wrong.append(f"{plan.model}: sequence {plan.sequences[i]} reads what is not its own")
        history: list[int] = tokens.tolist()
        return history

    def numbers(self, model: str, positions: I64, tokens: I64) -> I64:
        """Returns the numbers [N, layers, kv_heads], of which none comes twice."""
        places = self._places[model][None] * _TOKENS
        numbers: I64 = (places + positions[:, None, None]) * _TOKENS + tokens[:, None, None]
        return numbers


def _places(model: str, geometry: Geometry) -> I64:
    """Returns [layers, kv_heads] numbers that no other model has."""
    first = digest(model) % 900_000 * 10_000
    places: I64 = first + np.arange(geometry.blocks_per_page, dtype=np.int64)
    return places.reshape(geometry.layers, geometry.kv_heads)


def split_job(job: Job) -> tuple[Job, Job]:
    """Returns the rows of an offloaded step at home, and those that are offloaded."""
    assert job.offloaded is not None
    count = len(job.plan.sequences)
    home = replace(
        job, tokens=job.tokens[:count], samples=tuple(s for s in job.samples if s.row < count), offloaded=None
    )
    rest = tuple(replace(s, row=s.row - count) for s in job.samples if s.row >= count)
    return home, replace(
        job, plan=job.offloaded.plan, tokens=job.tokens[count:], samples=rest, offloaded=None
    )
