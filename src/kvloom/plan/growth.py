"""The batch sizes of the models of a unit. They grow until all are ample or nothing is left to grow into, and
always that one grows whose model is furthest behind its rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

AMPLE: Final = 3.0  # times the rate; more than that counts for nothing
BEYOND: Final = 0.01  # what could be answered beyond the rate counts so much of a request; it breaks ties
MAX_BATCH: Final = 256  # sequences of a decode job
BATCHES: Final = tuple(  # between them the throughput changes little
    batch
    for octave in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for batch in sorted({octave, octave * 5 // 4, octave * 3 // 2, octave * 7 // 4})
    if batch <= MAX_BATCH
)
_LAST: Final = len(BATCHES) - 1
_HIGHER: Final = (1.0, 1.5, 2.0, AMPLE)
_LEAST: Final = 2.0**-12

Bound = Literal["", "memory", "compute"]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A model in a unit. The sequences of numbers have one for each batch of BATCHES."""

    rate: float
    prefill: Sequence[float]
    """The seconds of the batch's prompts."""
    decode: Sequence[float]
    """The seconds of the batch's whole outputs, alone on the device."""
    occupied: Sequence[float]
    """The part of what the device can do that the batch's decodes take meanwhile."""
    busy: float
    """The part of the time in which the model decodes."""
    request: int
    """The bytes of K and V of a request."""

    def cycle(self, at: int, serial: float, crowd: float) -> float:
        """Returns the seconds from a batch's first prefill to its last token. `serial` is the seconds of one
        prefill of each model; `crowd` is the part of the device that the decodes of all occupy, with this
        batch's own."""
        return serial + self.decode[at] * max(1.0, crowd + (1.0 - self.busy) * self.occupied[at])


@dataclass(slots=True)
class _GrowthState:
    """The batches of all models while they grow."""

    at: list[int]
    """The place of each model's batch in BATCHES."""
    serial: float
    """The seconds of one prefill of each model, added up."""
    crowd: float
    """The part of the device that all decodes occupy on average."""
    used: int
    """The bytes of K and V that are used."""

    def grow(self, sides: Sequence[ModelShare], i: int) -> None:
        """Gives a model its next larger batch."""
        side, a = sides[i], self.at[i]
        self.at[i] = a + 1
        self.serial += side.prefill[a + 1] - side.prefill[a]
        self.crowd += side.busy * (side.occupied[a + 1] - side.occupied[a])
        self.used += (BATCHES[a + 1] - BATCHES[a]) * side.request


@dataclass(frozen=True, slots=True)
class Growth:
    """The batches that the models of a unit have grown to."""

    batches: tuple[int, ...]
    """The batch of each model."""
    ratios: tuple[float, ...]
    """The throughput of each model over its rate."""
    score: float
    """The sum of the requests that are answered, and a part of what could be answered beyond the rates
    (BEYOND)."""
    bound: Bound
    """The resource that kept those models from more that do not reach their rate."""
    used: int
    """The bytes of K and V that are used."""

    @property
    def level(self) -> float:
        return min(self.ratios, default=AMPLE)


def grow(sides: Sequence[ModelShare], pool: int) -> Growth | None:
    """Returns the batches that the models grow to; None if the pool is too small for one request of each.

    Growing step by step would pass, for each level, through the smallest batches with which all models reach
    that level: their need grows with the others' batches, and no model grows before it is the last. So it
    starts from the highest of some levels that can be reached, and takes single steps from there.
    """
    state = _GrowthState(
        [0] * len(sides),
        sum(side.prefill[0] for side in sides),
        sum(side.busy * side.occupied[0] for side in sides),
        sum(side.request for side in sides),
    )
    if state.used > pool:
        return None
    best = _growth(sides, state)
    for level in _HIGHER:
        reached = _reach(sides, state, pool, level)
        if reached is None:
            break
        state = reached
        best = max(best, _growth(sides, state), key=lambda growth: growth.score)
    if best.level >= 1.0:
        return best
    for reached in _approach(sides, state, pool):
        state = reached
        best = max(best, _growth(sides, state), key=lambda growth: growth.score)
    return _step(sides, state, pool, best)


def _approach(sides: Sequence[ModelShare], state: _GrowthState, pool: int) -> Iterator[_GrowthState]:
    """Returns states at rising levels. The last one is near the highest level that can be reached, which is
    below 1."""
    low, high = 0.5, 1.0
    while (reached := _reach(sides, state, pool, low)) is None:
        low, high = low / 2, low
        if low <= _LEAST:
            return
    yield reached
    for _ in range(2):
        middle = (low + high) / 2
        further = _reach(sides, reached, pool, middle)
        if further is None:
            high = middle
        else:
            low, reached = middle, further
            yield reached


def _reach(sides: Sequence[ModelShare], start: _GrowthState, pool: int, level: float) -> _GrowthState | None:
    """Returns the smallest batches, from `start` on, with which each model has `level` times its rate; None
    if there are none, or no room for them."""
    at, serial, crowd, used = list(start.at), start.serial, start.crowd, start.used
    behind = True
    while behind:
        behind = False
        for i, side in enumerate(sides):
            a, rate, idle = at[i], level * side.rate, 1.0 - side.busy
            prefill, decode, occupied = side.prefill, side.decode, side.occupied
            while True:  # `cycle`, written out, because all planning is spent here
                slower = crowd + idle * occupied[a]
                cycle = serial + (decode[a] * slower if slower > 1.0 else decode[a])
                if BATCHES[a] >= rate * cycle:
                    break
                if a == _LAST:
                    return None
                used += (BATCHES[a + 1] - BATCHES[a]) * side.request
                if used > pool:
                    return None
                serial += prefill[a + 1] - prefill[a]
                crowd += side.busy * (occupied[a + 1] - occupied[a])
                a += 1
                behind = True
            at[i] = a
    return _GrowthState(at, serial, crowd, used)


def _step(sides: Sequence[ModelShare], state: _GrowthState, pool: int, best: Growth) -> Growth:
    """Grows from a state on, batch by batch, and returns the best on the way."""
    stuck: list[Bound] = [""] * len(sides)
    while True:
        here = _growth(sides, state)
        if here.score > best.score:
            best = here
        free = [i for i in range(len(sides)) if not stuck[i]]
        i = min(free, key=here.ratios.__getitem__, default=-1)
        if i < 0 or here.ratios[i] >= 1.0:
            break  # who could still grow has enough, and would only slow the others
        side, a = sides[i], state.at[i]
        if a == _LAST:
            stuck[i] = "compute"
        elif state.used + (BATCHES[a + 1] - BATCHES[a]) * side.request > pool:
            stuck[i] = "memory"
        else:
            state.grow(sides, i)
    if best.level >= 1.0:
        return best
    short = [stuck[i] for i, ratio in enumerate(best.ratios) if ratio < 1.0]
    return replace(best, bound="memory" if "memory" in short else "compute")


def _growth(sides: Sequence[ModelShare], state: _GrowthState) -> Growth:
    """Solves equation 3 for each model: a batch takes all models' prefills, one after the other, and its
    decodes, which others slow down once the device has no more."""
    ratios, score = [], 0.0
    for side, a in zip(sides, state.at, strict=True):
        rate = side.rate
        ratio = BATCHES[a] / (side.cycle(a, state.serial, state.crowd) * rate) if rate else AMPLE
        ratios.append(ratio)
        score += rate * (ratio if ratio < 1.0 else 1.0 + BEYOND * (1.0 - 1.0 / min(ratio, AMPLE)))
    return Growth(tuple(BATCHES[a] for a in state.at), tuple(ratios), score, "", state.used)
