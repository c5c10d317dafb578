"""A job taken apart into the operators that a device runs one after the other: between two of them it can
turn to something else, as weaving has it do (Weaver, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from math import hypot
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvloom.cost.shape import ModelShape
from kvloom.cost.work import CostModel, Work

MOST_PARTS: Final = 64  # that an operator is run in


class Operator(NamedTuple):
    """seconds: that one of it takes, its start with it. number: how many a job has. most: parts in which one
    can be run."""

    name: str
    seconds: float
    number: int
    most: int


@runtime_checkable
class Operated(CostModel, Protocol):
    """A cost model that knows its device's operators. start: seconds that one more of them takes, however
    little it does; poll: that a look for another unit's task takes."""

    @property
    def start(self) -> float: ...

    @property
    def poll(self) -> float: ...

    def shape(self, model: str) -> ModelShape: ...

    def operators(self, work: Work) -> tuple[Operator, ...]:
        """Of a job that runs alone; together they take what the device is busy for."""

    def queued(self, work: Work) -> float:
        """Seconds of the job's operators that the host has issued, and the device not yet begun, where these
        are most."""

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        """Seconds of one layer's attention on the whole unit, for one new token of each of so many sequences,
        which hold so many tokens together."""


class Part(NamedTuple):
    """One operator of a layer: weights that each token is multiplied with, weights that are read, whatever
    the tokens, and numbers a token that pass through memory."""

    name: str
    number: int
    multiplied: float
    read: float
    passed: float


class Pace(NamedTuple):
    """Seconds: of multiplying with a weight, and of moving a byte."""

    multiply: float
    move: float


def layer_parts(shape: ModelShape, touched: float) -> Iterator[Part]:
    """Of one layer, but for what attention does with K and V. touched: experts that the job reads."""
    hidden, ffn, active = shape.hidden, shape.ffn, shape.active
    out = hidden * shape.head_dim * shape.heads
    qkv = shape.attention_parameters - out
    ups = 2 if shape.gated else 1
    up, down = hidden * ffn * ups, hidden * ffn
    yield Part("norm", 2, 0, 0, 2 * hidden)
    yield Part("qkv", 1, qkv, qkv, 3 * hidden)
    yield Part("rotary", 1, 0, 0, 3 * hidden)
    yield Part("attention", 1, 0, 0, 2 * hidden)
    yield Part("output", 1, out, out, 2 * hidden)
    yield Part("add", 2, 0, 0, 3 * hidden)
    yield Part("up", 1, up * active, up * touched, hidden + ups * ffn * active)
    yield Part("activation", 1, 0, 0, (ups + 1) * ffn * active)
    yield Part("down", 1, down * active, down * touched, hidden + ffn * active)


def operators_of(
    shape: ModelShape,
    *,
    tokens: int,
    drawn: int,
    touched: float,
    attention: float,
    start: float,
    pace: Pace,
) -> tuple[Operator, ...]:
    """attention: seconds of one layer's, without its start."""
    found = list[Operator]()
    for part in layer_parts(shape, touched):
        seconds = start + _seconds(part, tokens, shape.itemsize, pace)
        splits = part.read > 0 or part.name == "attention"
        if part.name == "attention":
            seconds += attention
        found.append(Operator(part.name, seconds, shape.layers * part.number, MOST_PARTS if splits else 1))
    weights = shape.vocab * shape.hidden
    head = _seconds(Part("head", 1, weights, weights, 0), drawn, shape.itemsize, pace)
    return (*found, Operator("head", start + head, 1, MOST_PARTS))


def _seconds(part: Part, tokens: int, itemsize: int, pace: Pace) -> float:
    products = hypot(part.multiplied * tokens * pace.multiply, part.read * itemsize * pace.move)
    return products + part.passed * tokens * itemsize * pace.move
