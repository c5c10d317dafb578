"""How many of a hot unit's sequences are to be away, as its need and its lender's steps say. The paper
(Weaver) leaves this to future work, so the rule is ours: up by steps while blocks are short and the lender's
steps stay well within their bound, down by steps beyond the bound, to zero where the lender needs its memory
back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvloom.engine.model_queue import WINDOW
from kvloom.types.load import UnitLoad

STEP: Final = 0.1  # of the sequences
CALM: Final = 2 / 3  # of the bound: what lies between is neither a reason to rise nor to fall
FIRST, LONGEST = 4, 128  # looks for which it does not rise, once it has had to fall


@dataclass(frozen=True, slots=True)
class Look:
    """What a period has shown. short: requests of the hot unit have waited for blocks, or were preempted, and
    the loan has room. slowdown: of the lender's decode steps against those without a loan, 0.15 where they
    take 15 % longer; None where nobody knows. pressed: the lender needs its memory."""

    short: bool
    slowdown: float | None
    pressed: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """value: from 0 to 1. rest: looks until it may rise again; patience: the next such rest, twice as long
    with each fall, and shorter again while all is well. So what is too much is not tried again and again."""

    value: float = 0.0
    rest: int = 0
    patience: int = FIRST


def adapted(share: Share, look: Look, bound: float) -> Share:
    """The share after one more look. bound: of the slowdown."""
    if look.pressed:
        return replace(share, value=0.0, rest=share.patience)
    if look.slowdown is None:  # with nothing away it can be measured
        return replace(share, value=0.0)
    if look.slowdown > bound and share.value > 0:
        return Share(_moved(share, -STEP), share.patience, min(2 * share.patience, LONGEST))
    if share.rest:
        return replace(share, rest=share.rest - 1)
    if look.short and look.slowdown <= CALM * bound and share.value < 1:
        return replace(share, value=_moved(share, STEP))
    return replace(share, patience=max(FIRST, share.patience - 1))


def _moved(share: Share, by: float) -> float:
    return min(1.0, max(0.0, round(share.value + by, 6)))


class Slowdown:
    """Of one lender's decode steps, from its reports. What steps take without a loan is measured while
    nothing is away, and then anew each time."""

    def __init__(self) -> None:
        self._alone: dict[str, float] = {}  # seconds of a step, by model
        self._since: dict[str, int] = {}  # the steps there were when nothing was away any more
        self._before: dict[str, int] = {}  # at the last report

    def seen(self, load: UnitLoad, *, away: bool) -> float | None:
        """Of the model that suffers most, of those that have stepped since the last report; 0 where none
        has. None where it is not known what its steps take alone. away: something is."""
        worst: float | None = 0.0
        for name, model in load.models.items():
            steps = model.decode_jobs_total
            before = self._before.get(name, steps - model.running)
            self._before[name] = steps
            if steps < before:  # it is another process
                self._alone.pop(name, None)
            if away or steps < before:
                self._since.pop(name, None)
            elif steps - self._since.setdefault(name, steps) >= WINDOW:
                self._alone[name] = model.step_seconds
            if steps == before:
                continue
            alone = self._alone.get(name)
            worst = max(worst, model.step_seconds / alone - 1) if alone and worst is not None else None
        return worst
