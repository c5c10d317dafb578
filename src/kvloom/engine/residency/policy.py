"""Decides which models' weights are in memory, by a pure function of a frozen view.

Models share one budget with the pool. Sleeping models that have requests are woken one at a time: the one of
the most urgent request first; of several the one for which room is being made, then what would miss its
deadline soonest and can still make it, then the one that has waited longest. Room is made in this order: free
blocks and cached prefixes; weights that nobody wants, the least asked for first; K and V beyond quotas;
weights of those who have been awake for a turn, the longest first; in the end all K and V that can be had.

Nobody starves: whoever has waited for `AGED` seconds goes before all that have waited for less. No room is
made in vain: the model for which room is being made is woken, unless a more urgent or older request comes.

Switching between models token by token follows Aegaeon (Xiang et al., SOSP 2025, section 4), and waking ahead
into idle blocks follows WarmServe (Lou et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

TURN: Final = 1.0  # seconds that a wanted model stays awake at least
TURN_PER_WAKE: Final = (
    10  # times that its turn is at least as long as its waking, so that little is lost to waking
)
MAX_DOUBLINGS: Final = 6  # doublings of a turn, at most
AGED: Final = 30.0  # seconds of waiting after which priorities and deadlines hold a model back no longer
MARGIN: Final = 8  # one part in so many of the budget stays free when a model is woken that nobody wants


@dataclass(frozen=True, slots=True)
class Residency:
    """Tells the policy of one model's weights."""

    name: str
    blocks: int  # that they take the place of while they are awake
    awake: bool  # jobs of the model may run
    wanted: bool  # a request of the model waits or runs
    priority: int  # of the most urgent of those; the smaller goes first
    since: float  # seconds: when they were woken if they are awake, else when they came to be wanted
    turn: float  # seconds that they stay awake at least if they are wanted
    last_job: int = 0  # jobs that the unit had started when one of the model last began or ended
    rate: float = 0.0  # requests a second of late; at first as planned
    gathered: int = 0  # blocks that are kept for them, as they are about to be woken
    excess: int = 0  # blocks of K and V that may be preempted, as they are beyond the model's quota
    held: int = 0  # blocks of K and V that can be preempted
    unreadable: bool = False  # they could not be read the last time
    begin_by: float = inf  # when jobs must begin for the oldest request to be in time; -inf if it cannot be
    waking: float = 0.0  # seconds that waking is expected to take


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """The weights of a unit's models at one moment."""

    models: tuple[Residency, ...]
    total: int  # blocks that weights and pool have together
    free: int  # blocks that nobody holds
    available: int  # free and cached blocks, less those that the next jobs of awake models need
    now: float  # seconds
    moving: bool = False  # a model is being woken, or falls asleep as soon as its job has ended
    short: bool = False  # K and V lack blocks which the weights that nobody wants have
    starving: str | None = None  # a model that is awake, and of which a request has lacked blocks for long
    stuck: bool = False  # no job runs, and none can: turns are of no use

    def is_over(self, model: Residency) -> bool:
        """Returns whether the turn of a model that is awake is over."""
        return self.stuck or self.now >= model.since + model.turn


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a model, for which there is room."""

    model: str
    reason: str = field(default="", compare=False)
    """In words, for the journal."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let a model's weights go as soon as no job of it runs. Their blocks are kept for the weights of
    `heir`, if that is a name."""

    model: str
    heir: str | None = None
    reason: str = field(default="", compare=False)
    """In words, for the journal."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Preempt a sequence of a model. The sequence's blocks are kept for the weights of `heir`."""

    model: str
    heir: str
    reason: str = field(default="", compare=False)
    """In words, for the journal."""


Move = Wake | Sleep | GiveWay


def turn_of(wake: float, lost: int) -> float:
    """Returns the seconds that a model stays awake at least. wake: seconds that waking takes; lost: the
    number of other models' wakings for which its K and V have given way since a request of it last ended.
    Each of these doubles the turn, so that even the longest request ends at some time."""
    return max(TURN, TURN_PER_WAKE * wake) * 2.0 ** min(lost, MAX_DOUBLINGS)


def next_move(view: ResidencyView) -> Move | None:
    """Returns what is to be done next about weights; None if nothing is, for now."""
    if view.moving:
        return None
    first = _first(view)
    if first is None or protected(view):
        return _move_without_waiters(view)
    if first.blocks - first.gathered > view.available:
        return _room_for(view, first)
    return Wake(first.name, f"requests wait; {_lacks(view, first)}")


def _room_for(view: ResidencyView, first: Residency) -> Move | None:
    """Returns what gives blocks to the weights of `first`, which lack some."""
    awake = [model for model in view.models if model.awake]
    unwanted = [model for model in awake if not model.wanted]
    if unwanted:
        return Sleep(min(unwanted, key=_demand).name, first.name, f"nobody wants it; {_lacks(view, first)}")
    beyond = [model for model in view.models if model.excess > 0 and model is not first]
    there = view.available + first.gathered + sum(model.excess for model in beyond)
    if beyond and there >= first.blocks:
        giver = max(beyond, key=lambda model: model.excess)
        why = f"{giver.excess} blocks beyond its quota; {_lacks(view, first)}"
        return GiveWay(giver.name, first.name, why)
    if awake:
        over = [model for model in awake if _must_yield(view, model, first)]
        if not over:
            return None
        giver = min(over, key=lambda model: model.since)
        return Sleep(giver.name, first.name, f"{_had(view, giver)}; {_lacks(view, first)}")
    holding = [model for model in view.models if model.held > 0]
    if not holding:
        return None
    giver = max(holding, key=lambda model: (model is not first, model.held))
    return GiveWay(giver.name, first.name, f"no model is awake; {_lacks(view, first)}")


def _lacks(view: ResidencyView, first: Residency) -> str:
    """Says what the weights of a model need."""
    here = view.available + first.gathered
    return f"the weights of {first.name} take {first.blocks} blocks, {here} of {view.total} are available"


def _had(view: ResidencyView, model: Residency) -> str:
    return f"it has had {view.now - model.since:.3g} s of its turn of {model.turn:.3g} s"


def protected(view: ResidencyView) -> bool:
    """Returns whether a model that is awake needs blocks for the rest of its turn more than those who wait:
    none are kept for their weights meanwhile."""
    return any(m.awake and m.name == view.starving and not view.is_over(m) for m in view.models)


def next_due(view: ResidencyView) -> float | None:
    """Returns the next time at which a turn is over or a model is held back no longer, if a model waits for
    room; None if there is no such time."""
    if _first(view) is None and view.starving is None:
        return None
    turns = [model.since + model.turn for model in view.models if model.awake]
    aged = [model.since + AGED for model in view.models if model.wanted and not model.awake]
    return min((time for time in turns + aged if time > view.now), default=None)


def next_waking(view: ResidencyView) -> str | None:
    """Returns the name of the model that is woken next, if one waits."""
    first = _first(view)
    return first.name if first else None


def _first(view: ResidencyView) -> Residency | None:
    """Returns the model that is woken next: the one of the most urgent request; of several the one for which
    room is being made, or the one with the least slack, or else that has waited longest."""
    wanting = [model for model in view.models if model.wanted and not model.awake]
    return min(wanting, key=lambda m: _rank(view, m), default=None)


def _rank(view: ResidencyView, model: Residency) -> tuple[float, bool, bool, float, float]:
    """Returns the place of a model that waits among the others."""
    priority, latest = _priority(view, model), model.begin_by - model.waking
    late = latest < view.now
    slack = inf if late or priority == -inf else latest
    return priority, not model.gathered, late and priority > -inf, slack, model.since


def _demand(model: Residency) -> tuple[float, int]:
    """Returns how much a model is wanted: how often it was asked of late, and when it was asked last."""
    return model.rate, model.last_job


def _priority(view: ResidencyView, model: Residency) -> float:
    """Returns the model's priority; one that has waited for long goes before all."""
    aged = not model.awake and view.now - model.since >= AGED
    return -inf if aged else model.priority


def _must_yield(view: ResidencyView, model: Residency, waiting: Residency) -> bool:
    """Returns whether a wanted model has to make room for one that waits: once its turn is over, if it is no
    more urgent than that one."""
    return view.is_over(model) and (view.stuck or _priority(view, waiting) <= model.priority)


def _move_without_waiters(view: ResidencyView) -> Move | None:
    """Returns the move that is made while no model waits: weights give way to K and V, those that nobody
    wants first, or are read before they are wanted."""
    awake = [model for model in view.models if model.awake]
    unwanted = [model for model in awake if not model.wanted]
    if view.short and unwanted:
        why = f"nobody wants it, and K and V lack blocks: {view.available} of {view.total} are available"
        return Sleep(min(unwanted, key=_demand).name, reason=why)
    if view.starving is not None:
        over = [m for m in awake if m.name != view.starving and view.is_over(m)]
        if not over:
            return None
        giver = min(over, key=lambda model: model.since)
        return Sleep(giver.name, reason=f"gave way to {view.starving}, which starves; {_had(view, giver)}")
    spare = min(view.free, view.available) - view.total // MARGIN
    ahead = [m for m in view.models if not (m.awake or m.unreadable) and m.blocks <= spare]
    if view.short or not ahead:
        return None
    first = max(ahead, key=_demand)
    return Wake(first.name, f"ahead of requests; {_lacks(view, first)}")
