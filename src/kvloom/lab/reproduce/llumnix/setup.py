"""Llumnix's set-up (section 6.1): LLaMA-7B on A10s, one an instance, asked by Poisson or in bursts.

What the paper does not tell is set once, for all of its figures, out of other figures of the paper.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct, structs

from kvloom.cluster.policies.dispatch import infaas
from kvloom.lab.reproduce.report import Scale, duration
from kvloom.lab.reproduce.setup import VOCAB, Hosted, check_answered, engine_spec, in_one_layer
from kvloom.lab.sim.fleet import Rescheduling, simulated
from kvloom.lab.sim.run import play, upheaval
from kvloom.lab.sim.unit import SimulatedUnit, start_seconds
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.arrivals import Gaps, Steps, arrivals, poisson
from kvloom.lab.workload.lengths import STAND_INS, Sides, coupled
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import Upheaval
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.router import Call
from kvloom.router.program import Program, load_program
from kvloom.router.replicas import Fleet
from kvloom.types.client import Frames
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import F64, I64
from kvloom.types.request import Level
from kvloom.types.spec import ModelSpec, Policy

MODEL: Final = "llama-7b"
DEVICE: Final = "A10"
INSTANCES: Final = 16
POOL: Final = 13_616  # tokens an instance (section 6.1)
SIZES: Final[Mapping[Scale, tuple[int, int]]] = {"full": (INSTANCES, 10_000), "small": (4, 60)}
"""Instances, and requests a point. Rates are a fleet's of INSTANCES."""

LINK: Final = 2.5e9  # bytes a second: what figure 10's blocking copies reach over gloo
HOST: Final = 12e-3
"""Seconds of a decode step that the paper's engine takes beside the device: with so many an urgent request of
section 6.4 takes 46 ms a token, as in the paper."""
ALIKE: Final = 2 / 3
"""Rank correlation of a conversation's prompts and answers: of the nine with GPT-4 that the preview of
BurstGPT's data shows. The other workloads are drawn, each side by itself."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """policy: of its batching. tokens: the most of a prefill job."""

    policy: Policy
    tokens: int


KVLOOM: Final = EngineKind("fcfs", 8192)
PUBLISHED: Final = EngineKind("vllm-2023", 12_800)
"""The paper's engine: vLLM of 2023 with the `max_num_batched_tokens` of the paper's artifact."""

_PAGE: Final = 16  # tokens, as in the paper's engine
_LONGEST: Final = 2 * 6144


def make_units(
    count: int = INSTANCES, levels: tuple[Level, ...] = (), engine: EngineKind = KVLOOM
) -> list[SimulatedUnit]:
    """Returns units of one GPU each. Jobs run one at a time on the whole of it, first come first served.

    levels: the levels of execution priority."""
    shape = find_shape(MODEL)
    cost = Hosted(Roofline(find_device(DEVICE), 1, {MODEL: shape}), lambda _: HOST)
    pages = in_one_layer(shape)
    block_bytes = _PAGE * shape.kv_bytes
    models = [ModelSpec(name=MODEL, path="", max_context=_LONGEST)]
    spec = engine_spec(
        "",
        models,
        kv_bytes=POOL // _PAGE * block_bytes,
        block_bytes=block_bytes,
        policy=engine.policy,
        chunk_tokens=engine.tokens,
    )
    spec = structs.replace(spec, priorities=levels)
    return [
        SimulatedUnit(
            structs.replace(spec, unit=f"gpu-{i}"),
            {MODEL: pages},
            1,
            cost,
            bandwidth=LINK,
            start=start_seconds([shape]),
        )
        for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Traffic:
    """name: as figure 11 has it. rates: the published ones, in requests a second of 16 instances. gaps: how
    they come. urgent: the part of the requests that has priority -1. alike: the rank correlation of prompts
    and answers."""

    name: str
    sides: Sides
    rates: tuple[float, ...]
    gaps: Gaps = poisson
    urgent: float = 0.0
    alike: float = 0.0

    def requests(self, rate: float, count: int, draw: int = 0) -> Iterator[WorkloadRequest]:
        """Yields the same requests at every rate, only faster. draw: another one has other requests."""
        timing, prompting, answering, picking, coupling = (
            np.random.default_rng([draw, kind]) for kind in range(1, 6)
        )
        prompts: I64 = self.sides.prompt.draw(prompting, count)
        outputs: I64 = self.sides.output.draw(answering, count)
        if self.alike:
            outputs = coupled(prompts, outputs, self.alike, coupling)
        urgent = picking.random(count) < self.urgent
        times = arrivals(self.gaps, Steps(np.array([rate])), timing)
        drawn = zip(times, prompts.tolist(), outputs.tolist(), urgent.tolist(), strict=False)
        for at, prompt, output, first in drawn:
            yield WorkloadRequest(at=at, model=MODEL, prompt=prompt, output=output, priority=-first)


SHAREGPT: Final = Traffic("ShareGPT", STAND_INS["sharegpt-gpt4"], (7.0, 7.25, 7.5, 7.75, 8.0), alike=ALIKE)
BURSTGPT: Final = Traffic("BurstGPT", STAND_INS["burstgpt"], (7.5, 7.75, 8.0, 8.25, 8.5), alike=ALIKE)
MEDIUM: Final = Traffic("M-M", STAND_INS["zipf-m"], (7.4, 7.5, 7.6, 7.7, 7.8))
LONG: Final = Traffic("L-L", STAND_INS["zipf-l"], (2.6, 2.7, 2.8, 2.9, 3.0))
SHORT: Final = Traffic("S-S", STAND_INS["zipf-s"], (26.0,))


async def infaas_by_reports(call: Call, fleet: Fleet) -> Frames:
    """Sends the call to the instance that had least memory in use when it reported; among equals by turns."""
    loads = {replica: load for replica in fleet.up if (load := replica.unit.report.reported())}
    chosen = infaas(loads, {replica: replica.turn for replica in loads}, fleet.arrival)
    replica = fleet.least_loaded() if chosen is None else fleet.turn([chosen])
    async for frame in call.start_generate(replica):
        yield frame


INTERVAL: Final = 16  # tokens a frame: what a router knows of a request that is to move


@dataclass(frozen=True, slots=True)
class System:
    """program: that dispatches. rescheduling: None where no request moves."""

    name: str
    program: Program
    rescheduling: Rescheduling | None = None


ROUND_ROBIN: Final = System("round-robin", load_program("data_parallel", {}))
INFAAS: Final = System("INFaaS++", load_program("infaas", {}))
BY_REPORTS: Final = System("INFaaS++ by reports", Program("infaas, by reports", infaas_by_reports, {}))
LLUMNIX: Final = System("Llumnix", load_program("freest", {}), Rescheduling())


@dataclass(frozen=True, slots=True)
class Times:
    """The mean and the P99 of a time, in seconds."""

    mean: float
    p99: float

    @staticmethod
    def of(seconds: F64) -> Times:
        return Times(float(seconds.mean()), float(np.quantile(seconds, 0.99)))


def shown_times(*measures: Times) -> tuple[str, ...]:
    """Returns the mean and the P99 of each, for the reader."""
    return tuple(duration(seconds) for one in measures for seconds in (one.mean, one.p99))


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one system at one load."""

    prefill: Times
    """To the first token."""
    decode: Times
    """Between tokens, of the requests that had two."""
    request: Times
    """To the last token."""
    preemptions: int
    moved: int
    """Requests that went over to another instance."""
    units: float
    """Instances that there were, in the mean until the last answer."""
    results: tuple[RequestResult, ...] = ()
    """The results of all requests, as they ended."""


def play_point(
    system: System,
    units: list[SimulatedUnit],
    requests: Iterable[WorkloadRequest],
    tell: Callable[[RequestResult], None],
) -> Point:
    """Raises RuntimeError if a request is not answered."""
    results: list[RequestResult] = []

    def end(result: RequestResult) -> None:
        check_answered(result)
        results.append(result)
        tell(result)

    async def main() -> Upheaval:
        clock = LoopClock(asyncio.get_running_loop())
        async with simulated(units, system.program, rescheduling=system.rescheduling) as fleet:
            await play(fleet.server, requests, Prompts(VOCAB), clock, end, interval=INTERVAL)
            return await upheaval(fleet)

    found = run_virtual(main())
    return Point(
        *latencies(results),
        preemptions=found.preempted,
        moved=found.moved or 0,
        units=found.units,
        results=tuple(results),
    )


def latencies(results: Iterable[RequestResult]) -> tuple[Times, Times, Times]:
    """Returns the times to the first token, between tokens, and to the last one."""
    rows = [(one.first, one.per_token, one.end) for one in results]
    first, between, last = zip(*rows, strict=True)
    steps = [seconds for seconds in between if seconds is not None]
    return Times.of(np.array(first)), Times.of(np.array(steps)), Times.of(np.array(last))


FOLDER: Final = "KVLOOM_DATA"  # the variable that names where the file is
NAME: Final = "llumnix_fig11.json"


class Curves(Struct, frozen=True):
    """Curves of (requests a second, value), by workload, measure and system."""

    figures: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}

    def at(self, traffic: str, measure: str, system: str, rate: float) -> float | None:
        """Returns None if nothing was published, or the file is not here."""
        curve = self.figures.get(traffic, {}).get(measure, {}).get(system, [])
        return next((value for at, value in curve if abs(at - rate) < 1e-6), None)


def read_curves() -> Curves:
    """Empty where the variable is not set. Raises ConfigError."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return Curves()
    path = Path(folder, NAME)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Curves)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {FOLDER} names a folder with {NAME}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not the curves of figure 11: {error}") from error
