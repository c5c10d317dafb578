"""The state of a fleet that is watched: its last samples, and its last events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.cli.gateway import ServerEvent
from kvloom.journal.samples import ModelTotals, Sample, UnitModel

SPAN: Final = 10.0
"""Seconds over which rates and means are taken."""
MOST_EVENTS: Final = 200


class Told(Struct, frozen=True):
    """The parts of an event that every type has; a newer server's event may be of a type that is not known
    here."""

    type: str = ""
    model: str = ""
    request: str = ""
    source: str = ""
    destination: str = ""
    name: str = ""
    reason: str = ""


class Happening(Struct, frozen=True):
    """A record of the journal."""

    at: float
    component: str
    event: Told


class History(Struct, frozen=True):
    samples: list[Sample]


class Pace(Struct, frozen=True, kw_only=True):
    """The work of a model in the last seconds. A number is None if there was nothing to count."""

    requests: float | None
    """The requests a second."""
    tokens: float | None
    """The tokens a second."""
    first: float | None
    """The mean time to the first token."""
    per_token: float | None
    hits: float | None
    """The part of the prompts' tokens that were cached."""


class Watched:
    """A fleet, as far as it was told of."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.samples: deque[Sample] = deque()
        self.happenings: deque[Happening] = deque(maxlen=MOST_EVENTS)
        self.problem = ""
        """The reason why nothing comes now."""
        self.last_id = ""
        """The id of the last event of the journal."""

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def take(self, event: ServerEvent) -> None:
        """Takes what one of the two streams has told. Raises ValueError if it is not kvloom's."""
        if event.kind == "history":
            self.samples.clear()
            self._keep(msgspec.json.decode(event.data, type=History).samples)
        elif event.kind == "sample":
            self._keep([msgspec.json.decode(event.data, type=Sample)])
        else:
            self.happenings.append(msgspec.json.decode(event.data, type=Happening))
            self.last_id = event.id or self.last_id

    def _keep(self, samples: Iterable[Sample]) -> None:
        """Keeps one sample from at least `SPAN` seconds ago, and those after it."""
        kept = self.samples
        kept.extend(samples)
        while len(kept) > 2 and kept[1].at <= kept[-1].at - SPAN:
            kept.popleft()

    def paces(self) -> dict[str, Pace]:
        """Returns what each model did, by its name."""
        if not self.samples:
            return {}
        old, new = self.samples[0], self.samples[-1]
        seconds = new.at - old.at
        before = {(unit.unit, one.model): one for unit in old.units for one in unit.models}
        there: dict[str, list[tuple[UnitModel, UnitModel | None]]] = {}
        for unit in new.units:
            for one in unit.models:
                there.setdefault(one.model, []).append((one, before.get((unit.unit, one.model))))
        earlier = {one.model: one for one in old.models}
        totals = {one.model: one for one in new.models}
        return {
            name: _pace(there.get(name, []), totals.get(name), earlier.get(name), seconds)
            for name in sorted(there.keys() | totals.keys())
        }


def _pace(
    units: list[tuple[UnitModel, UnitModel | None]],
    new: ModelTotals | None,
    old: ModelTotals | None,
    seconds: float,
) -> Pace:
    """Returns a model's pace between two samples. Totals begin anew with a process, so a part that would fall
    below zero is left out."""
    pairs = [(now, then) for now, then in units if then and now.output_tokens >= then.output_tokens]
    output = sum(now.output_tokens - then.output_tokens for now, then in pairs)
    prompt = sum(now.prompt_tokens - then.prompt_tokens for now, then in pairs)
    cached = sum(now.cached_tokens - then.cached_tokens for now, then in pairs)
    first = per_token = requests = None
    if new is not None:
        if old is None or old.requests > new.requests:  # The first one came in between, or a gateway began.
            old = ModelTotals(model=new.model)
        first = _mean(new.ttft_sum - old.ttft_sum, new.ttft_count - old.ttft_count)
        per_token = _mean(new.tpot_sum - old.tpot_sum, new.tpot_count - old.tpot_count)
        requests = _mean(new.requests - old.requests, seconds)
    return Pace(
        requests=requests,
        tokens=_mean(output, seconds),
        first=first,
        per_token=per_token,
        hits=_mean(cached, cached + prompt),
    )


def _mean(whole: float, count: float) -> float | None:
    return whole / count if count > 0 else None
