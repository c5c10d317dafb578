"""The requests of a workload, from whatever file describes one, in the order in which they come."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from kvloom.config.config import Config
from kvloom.config.fields import explain
from kvloom.config.file import read_yaml
from kvloom.lab.workload.arrivals import Steps, arrivals, in_pieces, power_law
from kvloom.lab.workload.request import Segment, WorkloadRequest, mix
from kvloom.lab.workload.spec import Conversations, ModelSpec, SystemPrompts, WorkloadSpec
from kvloom.lab.workload.traces import NAMELESS, RIGHT, VERSION, Header, Workload, read_workload, some
from kvloom.plan.plan import is_plan
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import F64

SPECS: Final = (".yaml", ".yml", ".json")
_AT_ONCE: Final = 1024
_IDS: Final = 1 << 32  # segments of a model; a number of 53 bits is one to every reader of JSON


def open_workload(path: Path, **changes: Any) -> Workload:
    """Returns the workload of a spec in YAML or JSON, of a workload file or of a trace. Raises ConfigError.

    `changes` are keys of a spec that are otherwise than in its file."""
    if path.suffix.lower() not in SPECS:
        return read_workload(path)
    spec = read_spec(path, **changes)
    header = Header(
        kvloom_workload=VERSION,
        name=spec.name or path.stem,
        seed=spec.seed,
        vocab=spec.vocab,
        models=tuple(spec.models),
    )
    return Workload(header, lambda: _requests(path, spec))


def read_spec(path: Path, **changes: Any) -> WorkloadSpec:
    """Raises ConfigError."""
    settings = read_yaml(path, RIGHT)
    if (kind := _other_kind(path, settings)) is not None:
        raise ConfigError(f"{path}: is a {kind}; {RIGHT} is right")
    settings |= changes
    if "models" not in settings:
        raise ConfigError(f"{path}: models: is missing; a list of the models' names is right")
    try:
        return WorkloadSpec.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, WorkloadSpec, {})}") from error


def is_spec(settings: Mapping[str, Any]) -> bool:
    """Returns whether the settings of a file are those of a workload, and of no config."""
    return _has_keys_of(WorkloadSpec, settings) and not _has_keys_of(Config, settings)


def _other_kind(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns what the file is, if it describes a fleet instead of a workload."""
    if is_plan(path):
        return "plan"
    if settings.keys() == {"nodes", "models"}:
        return "cluster's file"
    is_config = _has_keys_of(Config, settings) and not _has_keys_of(WorkloadSpec, settings)
    return "config" if is_config else None


def _has_keys_of(kind: type[BaseModel], settings: Mapping[str, Any]) -> bool:
    """Returns whether a file of that kind may have all of these keys."""
    return settings.keys() <= kind.model_fields.keys()


def _requests(path: Path, spec: WorkloadSpec) -> Iterator[WorkloadRequest]:
    if spec.replay is None:
        return some(path, make_requests(spec))
    trace = path.parent / Path(spec.replay.file).expanduser()
    return some(path, replay(read_workload(trace).requests(), spec))


def make_requests(spec: WorkloadSpec) -> Iterator[WorkloadRequest]:
    """Yields the requests of a spec that replays nothing, in bounded memory. The same spec makes the same
    requests, and a model's requests do not depend on the settings of the others. Raises ConfigError if
    hardly a request fits the limits of its lengths."""
    rates = _rates(spec)
    streams = [
        _stream(spec, name, model, number, rate)
        for number, ((name, model), rate) in enumerate(zip(spec.models.items(), rates, strict=True))
    ]
    return _cut(heapq.merge(*streams, key=attrgetter("at")), spec)


def _cut(requests: Iterable[WorkloadRequest], spec: WorkloadSpec) -> Iterator[WorkloadRequest]:
    """Yields the requests that come before the spec's end."""
    if spec.seconds is not None:
        end = spec.seconds
        requests = itertools.takewhile(lambda request: request.at < end, requests)
    return itertools.islice(requests, spec.requests)


def _shares(spec: WorkloadSpec) -> F64:
    """Returns [models] parts of the requests, of sum 1."""
    own = [model.rate for model in spec.models.values() if model.rate is not None]
    weights = np.array(own) if own else power_law(len(spec.models), spec.alpha)
    found: F64 = weights / weights.sum()
    return found


def _rates(spec: WorkloadSpec) -> list[Steps]:
    of_each = _shares(spec)
    if spec.top_rate is not None:
        total = spec.top_rate / of_each[0]
    else:
        total = spec.rate or sum(model.rate or 0.0 for model in spec.models.values())
    rates = of_each * total
    if spec.drift is None:
        return [Steps(rates[i : i + 1]) for i in range(len(rates))]
    phases = np.random.default_rng([spec.seed, 0]).random(len(rates))
    return [Steps(steps, spec.drift.period) for steps in spec.drift.rates(rates, phases)]


def _stream(
    spec: WorkloadSpec, name: str, model: ModelSpec, number: int, rate: Steps
) -> Iterator[WorkloadRequest]:
    """Yields one model's requests, without end. Each kind of draw has a generator of its own."""
    timing, sizing, picking, talking = (
        np.random.default_rng([spec.seed, kind, *name.encode()]) for kind in range(1, 5)
    )
    system, conversation = model.system or spec.system, model.conversation or spec.conversation
    lengths = (model.lengths or spec.lengths).pairs(sizing)
    sharing = _Sharing(system, itertools.count(number * _IDS), talking)
    gaps = model.arrivals or spec.arrivals
    if conversation is None:
        turns = sharing.singles(arrivals(gaps, rate, timing), lengths)
    else:
        starts = Steps(rate.rates / conversation.turns, rate.period)
        turns = sharing.conversations(arrivals(gaps, starts, timing), lengths, conversation)
    priorities = _priorities(model.priorities or spec.priorities or {0: 1.0}, picking)
    for (at, turn), priority in zip(turns, priorities, strict=False):
        yield WorkloadRequest(
            at=at, model=name, prompt=turn.prompt, output=turn.output, priority=priority, shared=turn.shared
        )


def _priorities(weights: dict[int, float], rng: np.random.Generator) -> Iterator[int]:
    """Yields priorities, each by its share, without end."""
    if len(weights) == 1:
        return itertools.repeat(next(iter(weights)))
    return _picks(list(weights), np.array(list(weights.values())), rng)


def _picks(values: list[int], weights: F64, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from in_pieces(rng.choice(values, _AT_ONCE, p=weights / weights.sum()))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt of `prompt` tokens that begins with `shared`, to be answered with `output` tokens."""

    prompt: int
    output: int
    shared: tuple[Segment, ...]


@dataclass(order=True, slots=True)
class _Due:
    """A conversation's next turn."""

    at: float
    order: int
    first: bool = field(compare=False)
    spoken: tuple[Segment, ...] = field(compare=False)


class _Sharing:
    """Prompts of one model that begin alike: with system prompts, and in conversations, whose turns repeat
    what was said before."""

    def __init__(self, system: SystemPrompts | None, ids: Iterator[int], rng: np.random.Generator) -> None:
        """`ids` are the model's own, for segments; the first of them are those of its system prompts."""
        self._rng = rng
        self._ids = ids
        self._system = system
        self._openings = [Segment(next(ids), system.tokens) for _ in range(system.kinds)] if system else []

    def singles(
        self, starts: Iterator[float], lengths: Iterator[tuple[int, int]]
    ) -> Iterator[tuple[float, _Turn]]:
        """Yields requests that share nothing but the system prompt, which comes before the drawn prompt."""
        for at in starts:
            prompt, output = next(lengths)
            shared = self._opening()
            yield at, _Turn(_tokens(shared) + prompt, output, shared)

    def conversations(
        self, starts: Iterator[float], lengths: Iterator[tuple[int, int]], kind: Conversations
    ) -> Iterator[tuple[float, _Turn]]:
        """Yields the turns of conversations. The drawn prompt is what the user says in a turn; in the next
        turn it and the answer (made-up tokens, as many as it had) come before what is said then.

        `starts` are the arrivals of the first turns."""
        order = itertools.count()
        due: list[_Due] = []
        for start in starts:
            heapq.heappush(due, _Due(start, next(order), True, self._opening()))
            while due and due[0].at <= start:
                now = heapq.heappop(due)
                said, output = next(lengths)
                spoken = (*now.spoken, Segment(next(self._ids), said))
                if not now.first and _tokens(spoken) + output > kind.max_context:
                    continue
                yield now.at, _Turn(_tokens(spoken), output, spoken)
                if self._rng.random() < 1 - 1 / kind.turns:
                    after = now.at + float(self._rng.exponential(kind.pause))
                    spoken = (*spoken, Segment(next(self._ids), output))
                    heapq.heappush(due, _Due(after, next(order), False, spoken))

    def _opening(self) -> tuple[Segment, ...]:
        if self._system is None or self._rng.random() >= self._system.share:
            return ()
        return (self._openings[int(self._rng.integers(self._system.kinds))],)


def _tokens(segments: tuple[Segment, ...]) -> int:
    return sum(segment.tokens for segment in segments)


def faster(requests: Iterable[WorkloadRequest], rate: float) -> Iterator[WorkloadRequest]:
    """Yields `rate` times as many requests a second."""
    return (msgspec.structs.replace(request, at=request.at / rate) for request in requests)


def longer(requests: Iterable[WorkloadRequest], length: float) -> Iterator[WorkloadRequest]:
    """Yields requests of `length` times as many tokens, at least one of each kind. Shared tokens stay
    shared."""
    for request in requests:
        shared = tuple(Segment(one.id, _times(one.tokens, length)) for one in request.shared)
        held = _tokens(request.shared)
        own = _times(request.prompt - held, length) if request.prompt > held else 0
        prompt = _tokens(shared) + own
        output = _times(request.output, length)
        yield msgspec.structs.replace(request, prompt=prompt, output=output, shared=shared)


def _times(tokens: int, length: float) -> int:
    return max(1, round(tokens * length))


def replay(requests: Iterable[WorkloadRequest], spec: WorkloadSpec) -> Iterator[WorkloadRequest]:
    """Yields a trace's requests as the spec has them. Requests that name no model go to the spec's models by
    their shares; those whose prompts begin with the same two segments go to one model. Raises ConfigError for
    a model that the spec lacks."""
    assert spec.replay is not None
    most = spec.replay.max_total or np.inf
    scaled = longer(faster(requests, spec.replay.rate_scale), spec.replay.length_scale)
    fitting = (request for request in scaled if request.prompt + request.output <= most)
    return _cut(_assigned(fitting, spec), spec)


def _assigned(requests: Iterable[WorkloadRequest], spec: WorkloadSpec) -> Iterator[WorkloadRequest]:
    names = list(spec.models)
    picking, ranking = (np.random.default_rng([spec.seed, kind]) for kind in (1, 2))
    bounds = list(itertools.accumulate(_shares(spec)))
    drawn = {
        name: _priorities(weights, ranking)
        for name, model in spec.models.items()
        if (weights := model.priorities or spec.priorities)
    }
    for request in requests:
        model = request.model
        if model == NAMELESS:
            model = _pick(request, spec.seed, names, bounds, picking)
        if model not in spec.models:
            raise ConfigError(f"replay.file: asks for `{model}`; models: names {', '.join(names)}")
        priority = next(drawn[model]) if model in drawn else request.priority
        yield msgspec.structs.replace(request, model=model, priority=priority)


def _pick(
    request: WorkloadRequest,
    seed: int,
    names: Sequence[str],
    bounds: Sequence[float],
    rng: np.random.Generator,
) -> str:
    if len(request.shared) < 2:
        draw = float(rng.random())
    else:
        draw = mix(mix(mix(seed) + request.shared[0].id) + request.shared[1].id) / 2**64
    return names[min(bisect(bounds, draw), len(names) - 1)]
