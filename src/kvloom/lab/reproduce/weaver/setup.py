"""Weaver's set-up (section 5): two Llama-3-8B, a hot and a cold one, on two GPUs that decode.

Prefills are done by GPUs of their own, as in the paper, and are not simulated: prompts come computed. What
the paper does not tell is set once, for all of its figures. The systems, and what one has of a load, stand at
the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from operator import attrgetter
from typing import Final, Literal

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.muxserve.systems import in_runtime
from kvloom.lab.reproduce.report import Tell
from kvloom.lab.reproduce.setup import (
    AT_ONCE,
    TellPart,
    check_answered,
    engine_spec,
    in_one_layer,
    play_all,
    play_watched,
    poisson_requests,
)
from kvloom.lab.reproduce.weaver.ranks import MODEL, RANKED
from kvloom.lab.sim.fleet import SimulatedFleet
from kvloom.lab.sim.unit import PARTS, SimulatedUnit
from kvloom.lab.workload.lengths import STAND_INS, Sides
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.cost.devices import DeviceSpec, find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Operator, Work
from kvloom.types.geometry import I64
from kvloom.types.job import Phase
from kvloom.types.load import Waits
from kvloom.types.spec import Control, ModelSpec, Policy, Splitting, WeaveSpec

HOT: Final = "hot"
COLD: Final = "cold"
COLD_RATE: Final = 1.0  # requests a second, at which the paper has section 2.3's cold model
LONGEST: Final = 2048  # tokens of a sequence; longer ones the paper leaves out
TAKEN: Final = 8.0e9  # bytes of a GPU that hold neither weights nor K and V: see `pool_bytes`

_PAGE: Final = 32  # tokens: blocks of 16 KiB hold as many
_LEAST: Final = 1 / PARTS  # of the compute, for a prefill that computes nothing


class Decoder(Roofline):
    """A device to which prompts come computed, so that prefills take no time."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        decodes = [other for other in beside if other.phase is Phase.DECODE]
        return super().seconds(work, decodes) if work.phase is Phase.DECODE else 0.0

    def operators(self, work: Work) -> tuple[Operator, ...]:
        return super().operators(work) if work.phase is Phase.DECODE else ()

    def queued(self, work: Work) -> float:
        return super().queued(work) if work.phase is Phase.DECODE else 0.0


def pool_bytes(device: DeviceSpec, gpus: int, models: int) -> int:
    """Returns what weights leave. TAKEN is such that the paper's 118 sequences of Azure's lengths use 88.9 %
    of what an A100 of 40 GB has left (section 5.1)."""
    weights = find_shape(MODEL).weight_bytes
    return int(gpus * (device.memory - TAKEN)) - models * weights


def unit(
    name: str,
    device: str,
    models: Sequence[str],
    *,
    gpus: int = 1,
    policy: Policy = "fcfs",
    shares: Sequence[float | None] = (None, None),
    rates: Sequence[float] = (1.0, 1.0),
    weave: WeaveSpec | None = None,
) -> SimulatedUnit:
    """Returns a unit. If it has several models, `rates` are theirs, and `shares` those of their decode
    steps."""
    sheet, shape = find_device(device), find_shape(MODEL)
    page = in_one_layer(shape)
    block_bytes = _PAGE * shape.kv_bytes
    room = pool_bytes(sheet, gpus, len(models)) // block_bytes * block_bytes
    given = tuple(
        ModelSpec(name=one, path="", max_context=LONGEST, rate=rate, prefill_share=_LEAST, decode_share=part)
        for one, part, rate in zip(models, shares, rates, strict=False)
    )
    spec = structs.replace(
        engine_spec(name, given, kv_bytes=room, block_bytes=block_bytes),
        policy=policy,
        threads=PARTS,
        overload=0.2,
        weave=weave,
    )
    cost = Decoder(sheet, gpus, dict.fromkeys(models, shape), RANKED)
    return SimulatedUnit(spec, dict.fromkeys(models, page), PARTS, cost, bandwidth=sheet.link / 2)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace. `sides` tells what its lengths are like. `prompt` and `output` are their means once sequences
    that are too long are left out, as the paper tells them."""

    name: str
    sides: Sides | None
    prompt: int
    output: int

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yields the lengths of prompts and of answers, without end."""
        while True:
            prompts, outputs = self._draw(rng)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)

    def _draw(self, rng: np.random.Generator) -> tuple[I64, I64]:
        if self.sides is None:
            return np.full(AT_ONCE, self.prompt), np.full(AT_ONCE, self.output)
        prompts, outputs = (side.draw(rng, 4 * AT_ONCE) for side in self.sides)
        fits = prompts + outputs <= LONGEST
        prompts, outputs = (
            np.maximum(1, np.rint(drawn[fits] * (mean / drawn[fits].mean()))).astype(np.int64)
            for drawn, mean in ((prompts, self.prompt), (outputs, self.output))
        )
        fits = prompts + outputs <= LONGEST
        return prompts[fits], outputs[fits]


BURSTGPT: Final = Trace("BurstGPT", STAND_INS["burstgpt"], 575, 340)
AZURE: Final = Trace("Azure-Conv", STAND_INS["azure-conversation"], 749, 232)
LONG: Final = Trace("512 in, 1,024 out", None, 512, 1024)


def requests(trace: Trace, hot: float, cold: float, seconds: float) -> Iterator[WorkloadRequest]:
    """Yields Poisson requests, at these rates. A model's requests do not depend on the other's."""
    rates = ((HOT, hot), (COLD, cold))
    each = (poisson_requests(model, rate, seconds, trace.pairs) for model, rate in rates if rate)
    return merge(*each, key=attrgetter("at"))


SHARE: Final = 0.45  # of the sequences that are away: the paper's best (section 5.2)
PART: Final = 0.8  # of the cold unit's pool, lent
SIZE: Final = "7b"  # by which MuxServe's estimator knows models like these
SHARES: Final = (0.9, 0.3)  # of MuxServe's decode processes: its largest, and its smallest (ICML 2024)


WAITS: Final = 0.05  # of a step: algorithm 1's threshold
BOUND: Final = 0.15  # by which the cold model's steps may take longer under `share: auto`: kvloom's default


def weave(
    share: float | Literal["auto"],
    control: Control = "operators",
    split: Splitting = "auto",
    *,
    part: float = PART,
    waits: float = WAITS,
    bound: float = BOUND,
) -> WeaveSpec:
    """The relation of the cold unit to the hot one."""
    return WeaveSpec(COLD, share, part, bound, control=control, split=split, waits=waits)


MakeUnits = Callable[[str, float, float], list[SimulatedUnit]]
"""The units on GPUs of a kind, for requests a second of the hot and of the cold model."""


@dataclass(frozen=True, slots=True)
class System:
    """A system that is compared."""

    name: str
    units: MakeUnits


def temporal(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Puts both models on both GPUs, by turns on the whole of them."""
    return [unit("both", device, [HOT, COLD], gpus=2, rates=(hot, cold))]


def multiplexed(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Puts both models on both GPUs, side by side, with MuxServe's batching, quotas and processes of fixed
    shares."""
    return [unit("both", device, [HOT, COLD], gpus=2, policy="adbs", shares=SHARES, rates=(hot, cold))]


def in_muxserve(units: MakeUnits) -> MakeUnits:
    """Adds what MuxServe's runtime adds to a step, as in the experiments of its own paper."""

    def made(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
        sizes = {HOT: SIZE, COLD: SIZE}
        return [replace(one, cost=in_runtime(one.cost, one.spec, sizes)) for one in units(device, hot, cold)]

    return made


def dedicated(spec: WeaveSpec | None = None) -> MakeUnits:
    """Gives each model a GPU, and offloads a part of the hot model's sequences if there is a `spec`."""

    def units(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
        return [unit(HOT, device, [HOT], weave=spec), unit(COLD, device, [COLD])]

    return units


def sharing(share: float) -> System:
    """Returns Weaver with another share."""
    return System(f"Weaver, {100 * share:.0f} %", dedicated(weave(share)))


DEDICATED: Final = System("dedicated", dedicated())
MUXSERVE: Final = System("MuxServe", in_muxserve(multiplexed))
TEMPORAL: Final = System("Mux-Temporal", in_muxserve(temporal))
BARE_MUXSERVE: Final = System("MuxServe, bare", multiplexed)
BARE_TEMPORAL: Final = System("Mux-Temporal, bare", temporal)
WEAVER: Final = System("Weaver", dedicated(weave(SHARE)))


WARM: Final = 0.5  # the part of the time that is not counted
_LOOK: Final = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Load:
    """A load. Requests come for `seconds`, then it ends. `hot` and `cold` are requests a second. If `at_once`
    is set, so many of the hot model come after `warm` seconds instead, and it ends with the last of them."""

    device: str
    trace: Trace
    hot: float
    seconds: float
    cold: float = COLD_RATE
    at_once: int = 0
    warm: float = 0.0

    @property
    def where(self) -> str:
        """Returns the device and the trace, for the reader."""
        return f"{self.device}, {self.trace.name}"

    @property
    def counted(self) -> float:
        """Returns the seconds from which on the time counts."""
        return self.warm if self.at_once else WARM * self.seconds


@dataclass(frozen=True, slots=True)
class Course:
    """Means of one model in the counted time. `rate` is the answers a second, by their tokens. `tpot` is the
    seconds a token of those that ended, as the mean of their means, and `p99` the P99 of these. `batch` is
    the mean number of sequences that run."""

    rate: float
    tpot: float
    p99: float
    batch: float


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one system under one load. `filled` is the mean part of each unit's pool that is in use,
    with what others have of it. `waits` are those of the last loan's tasks, with what the queueing model
    expects; None if there was no loan. `share` is the mean share of the hot model's sequences that were to be
    offloaded."""

    hot: Course
    cold: Course
    filled: dict[str, float]
    waits: Waits | None = None
    share: float = 0.0


def play_point(system: System, load: Load, tell: TellPart) -> Point:
    """Plays the system under the load. `tell` hears which part of the time is over."""
    return _Play(load, tell).run(system.units(load.device, load.hot, load.cold))


def play_points(plan: Sequence[tuple[System, Load]], tell: Tell) -> list[Point]:
    """Plays each system under its load."""

    def name(run: tuple[System, Load]) -> str:
        system, load = run
        return f"{system.name}, {load.where}"

    return play_all(plan, lambda run, part: play_point(*run, part), name, tell)


@dataclass
class _Seen:
    """The numbers of one model at each look. `tokens` are those made so far."""

    tpots: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def course(self, answer: int) -> Course:
        """Returns the model's means. `answer` is the mean number of tokens of an answer."""
        times = np.array(self.tpots or [0.0])
        batch = float(np.mean(self.running or [0]))
        made = self.tokens[-1] - self.tokens[0] if self.tokens else 0
        rate = made / (_LOOK * max(1, len(self.tokens) - 1)) / answer
        return Course(rate, float(times.mean()), float(np.quantile(times, 0.99)), batch)


class _Play:
    def __init__(self, load: Load, tell: TellPart) -> None:
        self._load, self._tell = load, tell
        self._seen = {HOT: _Seen(), COLD: _Seen()}
        self._filled: dict[str, list[float]] = {}
        self._over = asyncio.Event()  # of what came at once
        self._waits: Waits | None = None
        self._shares: list[float] = []

    def run(self, units: Sequence[SimulatedUnit]) -> Point:
        load = self._load
        play_watched(
            units,
            self._requests(),
            self._end,
            self._look,
            seconds=load.seconds,
            first=load.counted,
            every=_LOOK,
            over=self._over,
        )
        hot, cold = (self._seen[model].course(load.trace.output) for model in (HOT, COLD))
        filled = {name: float(np.mean(parts)) for name, parts in self._filled.items()}
        return Point(hot, cold, filled, self._waits, float(np.mean(self._shares or [0.0])))

    async def _look(self, fleet: SimulatedFleet) -> None:
        """Notes how full all pools are."""
        for name, engine in fleet.engines.items():
            load = await engine.load()
            for model, told in load.models.items():
                self._seen[model].running.append(told.running)
                self._seen[model].tokens.append(told.output_tokens_total)
            self._waits = load.waits or self._waits
            used = sum(told.used_blocks for told in load.models.values())
            self._filled.setdefault(name, []).append(used / load.total_blocks)
            loan = engine.borrower.loan(HOT) if name == HOT else None
            if name == HOT:
                self._shares.append(loan.share if loan is not None else 0.0)
            if loan is not None:
                away = loan.pool.total - loan.pool.available
                self._filled.setdefault("lent", []).append(away / load.total_blocks)

    def _requests(self) -> Iterator[WorkloadRequest]:
        load, trace = self._load, self._load.trace
        crowd = (
            WorkloadRequest(at=load.warm, model=HOT, prompt=trace.prompt + n % 16, output=trace.output)
            for n in range(load.at_once)
        )
        others = requests(trace, load.hot, load.cold, load.seconds)
        for request in merge(crowd, others, key=attrgetter("at")):
            self._tell(request.at / load.seconds)
            yield request

    def _end(self, result: RequestResult) -> None:
        check_answered(result)
        request, end = result.request, result.end
        seen = self._seen[request.model].tpots
        if end is not None and result.per_token is not None and request.at + end >= self._load.counted:
            seen.append(result.per_token)
        if request.model == HOT and 0 < len(seen) == self._load.at_once:
            self._over.set()
