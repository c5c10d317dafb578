"""A job as a cost model sees it, and what a cost model is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import hypot
from typing import Final, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.geometry import I64
from kvloom.types.job import Phase


class Work(Struct, frozen=True, gc=False):
    """One job of one model."""

    model: str
    phase: Phase
    share: float
    """The job's share of the unit's compute, in (0, 1]."""
    batch: int
    """The number of sequences. A step that verifies drafts counts rows: a sequence with k drafts is k + 1."""
    tokens: int
    """The tokens that the job computes, over all sequences."""
    drawn: int
    """The number of tokens whose logits are needed."""
    pairs: int
    """The number of (query, key) pairs that attention looks at."""
    context: int
    """The number of cached tokens that the job reads, over all sequences."""
    rows: int = 0
    """The number of sequences of a mixed job that decode."""
    held: int = 0
    """The number of cached tokens that those sequences read."""

    @staticmethod
    def of(
        model: str, phase: Phase, share: float, appends: I64, starts: I64, drawn: int, rows: int = 0
    ) -> Work:
        """Returns the work of a batch. `appends` and `starts` [B] are the tokens that each sequence computes,
        and those that it has already. `rows` are as in `Job`."""
        tokens, context = int(appends.sum()), int(starts.sum())
        pairs = int(appends @ starts) + int(appends @ (appends + 1)) // 2
        held = int(starts[:rows].sum())
        return Work(model, phase, share, appends.size, tokens, drawn, pairs, context, rows, held)

    @property
    def prompts(self) -> Work:
        """Returns the prefill that has a mixed job's prompts alone."""
        return replace(
            self,
            phase=Phase.PREFILL,
            batch=self.batch - self.rows,
            tokens=self.tokens - self.rows,
            drawn=self.drawn - self.rows,
            pairs=max(0, self.pairs - self.held - self.rows),
            context=self.context - self.held,
            rows=0,
            held=0,
        )

    @property
    def step(self) -> Work:
        """Returns the decode step that a mixed job has in it."""
        decodes = Work.decode(self.model, self.share, (0,) * self.rows)
        return replace(decodes, pairs=self.held + self.rows, context=self.held)

    def next(self, steps: int = 1) -> Work:
        """Returns the decode step that comes so many steps after this one."""
        return Work(
            self.model,
            self.phase,
            self.share,
            self.batch,
            self.tokens,
            self.drawn,
            self.pairs + steps * self.batch,
            self.context + steps * self.batch,
        )

    @staticmethod
    def prefill(model: str, share: float, lengths: Sequence[int]) -> Work:
        """Returns the prefill of whole prompts of these lengths at once."""
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        return Work(model, Phase.PREFILL, share, len(lengths), sum(lengths), len(lengths), pairs, 0)

    @staticmethod
    def decode(model: str, share: float, contexts: Sequence[int]) -> Work:
        """Returns a decode step of sequences that hold so many tokens."""
        batch, held = len(contexts), sum(contexts)
        return Work(model, Phase.DECODE, share, batch, batch, batch, held + batch, held)

    @staticmethod
    def verify(model: str, share: float, contexts: Sequence[int], drafted: int) -> Work:
        """Returns a decode step of sequences that hold so many tokens, which computes their next ones and so
        many drafts of each. All rows of a sequence read what it holds, and it is read once."""
        each, held = drafted + 1, sum(contexts)
        rows = each * len(contexts)
        pairs = each * held + len(contexts) * each * (each + 1) // 2
        return Work(model, Phase.DECODE, share, rows, rows, rows, pairs, held)


class CostModel(Protocol):
    """Says for one unit, that is for a group of devices and the models on it, how long jobs take."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        """Returns the seconds from launch to result, if all of `beside` ran at the same time from its first
        moment to its last. Raises ConfigError for a model that it does not know."""


MOST_PARTS: Final = 64  # into how many parts an operator may be split, at most


class Operator(NamedTuple):
    """An operator of a job."""

    name: str
    seconds: float
    """The time that one such operator takes, with its start."""
    number: int
    """The number of such operators in a job."""
    most: int
    """The number of parts in which one can be run."""


@runtime_checkable
class OperatorCostModel(CostModel, Protocol):
    """A cost model that knows its device's operators."""

    @property
    def start(self) -> float:
        """Returns the seconds that one more operator takes, however little it does."""

    @property
    def poll(self) -> float:
        """Returns the seconds that a look for another unit's task takes."""

    def shape(self, model: str) -> ModelShape: ...

    def operators(self, work: Work) -> tuple[Operator, ...]:
        """Returns the operators of a job that runs alone, those of a layer in the order in which they run.
        Their times add up to the time for which the device is busy."""

    def queued(self, work: Work) -> float:
        """Returns the most seconds of the job's operators that the host has issued, and the device not yet
        begun."""

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        """Returns the seconds of one layer's attention on the whole unit, for one new token of each of so
        many sequences, which hold so many tokens together."""


class LayerOperator(NamedTuple):
    """One operator of a layer."""

    name: str
    multiplied: float
    """The number of weights that each token is multiplied with."""
    read: float
    """The number of weights that are read, whatever the tokens."""
    passed: float
    """The numbers of a token that pass through memory."""


class WorkPace(NamedTuple):
    """The pace of a device."""

    multiply: float
    """The seconds of multiplying with a weight."""
    move: float
    """The seconds of moving a byte."""


def layer_parts(shape: ModelShape, touched: float) -> Iterator[LayerOperator]:
    """Returns the operators of one layer in the order in which they run, but for what attention does with K
    and V. `touched` is the number of experts that the job reads."""
    hidden, ffn, active = shape.hidden, shape.ffn, shape.active
    out = hidden * shape.head_dim * shape.heads
    qkv = shape.attention_parameters - out
    ups = 2 if shape.gated else 1
    up, down = hidden * ffn * ups, hidden * ffn
    norm, add = LayerOperator("norm", 0, 0, 2 * hidden), LayerOperator("add", 0, 0, 3 * hidden)
    yield norm
    yield LayerOperator("qkv", qkv, qkv, 3 * hidden)
    yield LayerOperator("rotary", 0, 0, 3 * hidden)
    yield LayerOperator("attention", 0, 0, 2 * hidden)
    yield LayerOperator("output", out, out, 2 * hidden)
    yield add
    yield norm
    yield LayerOperator("up", up * active, up * touched, hidden + ups * ffn * active)
    yield LayerOperator("activation", 0, 0, (ups + 1) * ffn * active)
    yield LayerOperator("down", down * active, down * touched, hidden + ffn * active)
    yield add


def operators_of(
    shape: ModelShape,
    *,
    tokens: int,
    drawn: int,
    touched: float,
    attention: float,
    start: float,
    pace: WorkPace,
) -> tuple[Operator, ...]:
    """Returns the operators of a job, those of a layer in the order in which they run. `attention` is the
    seconds of one layer's attention, without its start."""
    found = list[Operator]()
    for part in layer_parts(shape, touched):
        seconds = start + _seconds(part, tokens, shape.itemsize, pace)
        splits = part.read > 0 or part.name == "attention"
        if part.name == "attention":
            seconds += attention
        found.append(Operator(part.name, seconds, shape.layers, MOST_PARTS if splits else 1))
    weights = shape.vocab * shape.hidden
    head = _seconds(LayerOperator("head", weights, weights, 0), drawn, shape.itemsize, pace)
    return (*found, Operator("head", start + head, 1, MOST_PARTS))


def _seconds(part: LayerOperator, tokens: int, itemsize: int, pace: WorkPace) -> float:
    products = hypot(part.multiplied * tokens * pace.multiply, part.read * itemsize * pace.move)
    return products + part.passed * tokens * itemsize * pace.move
