"""Llumnix's set-up (section 6.1): LLaMA-7B on A10s, one an instance, asked by Poisson or in bursts.

What the paper does not tell is set once, for all of its figures, out of other figures of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.sim.unit import SimulatedUnit, start_seconds
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.reproduce.report import Scale
from kvloom.types.geometry import I64
from kvloom.types.job import Phase
from kvloom.types.request import Level
from kvloom.types.spec import EngineSpec, ModelSpec
from kvloom.workload.arrivals import Gaps, Steps, arrivals, poisson
from kvloom.workload.ask import Ask
from kvloom.workload.coupling import coupled
from kvloom.workload.stand_ins import STAND_INS, Sides

MODEL: Final = "llama-7b"
DEVICE: Final = "A10"
INSTANCES: Final = 16
POOL: Final = 13_616  # tokens an instance (section 6.1)
SIZES: Final[Mapping[Scale, tuple[int, int]]] = {"full": (INSTANCES, 10_000), "small": (4, 60)}
"""Instances, and requests a point. Rates are a fleet's of INSTANCES."""

LINK: Final = 2.5e9  # bytes a second: what figure 10's blocking copies reach over gloo
HOST: Final = (
    12e-3  # seconds of a decode step that the paper's engine takes beside the device: figure 3's 62 %
)
VOCAB: Final = 32_000
ALIKE: Final = 2 / 3
"""Rank correlation of a conversation's prompts and answers: of the nine with GPT-4 that the preview of
BurstGPT's data shows. The other workloads are drawn, each side by itself."""

_PAGE: Final = 16  # tokens, as in the paper's engine
_CHUNK_TOKENS: Final = 8192  # of a prefill job: any prompt whole
_LONGEST: Final = 2 * 6144
_MAX_RUNNING: Final = 256
_MAX_WAITING: Final = 1 << 20  # nobody is turned away


class Hosted:
    """Satisfies `CostModel`: a decode step waits for the host, which prepares it."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._cost.seconds(work, beside) + (HOST if work.phase is Phase.DECODE else 0.0)


def make_units(count: int = INSTANCES, levels: tuple[Level, ...] = ()) -> list[SimulatedUnit]:
    """One GPU each. Jobs run one at a time on the whole of it, first come first served. levels: of execution
    priority."""
    shape = find_shape(MODEL)
    cost = Hosted(Roofline(find_device(DEVICE), 1, {MODEL: shape}))
    pages = _in_one(shape)
    block_bytes = _PAGE * shape.kv_bytes
    spec = EngineSpec(
        models=(ModelSpec(name=MODEL, path="", max_context=_LONGEST),),
        kv_bytes=POOL // _PAGE * block_bytes,
        block_bytes=block_bytes,
        policy="fcfs",
        max_running=_MAX_RUNNING,
        max_waiting=_MAX_WAITING,
        chunk_tokens=_CHUNK_TOKENS,
        threads=1,
        priorities=levels,
    )
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


def _in_one(shape: ModelShape) -> ModelShape:
    """A shape whose pages are one block each, with as many bytes: pools count fewer things, and the same
    room."""
    return structs.replace(
        shape, layers=1, kv_heads=1, head_dim=shape.layers * shape.kv_heads * shape.head_dim
    )


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

    def asks(self, rate: float, count: int) -> Iterator[Ask]:
        """The same requests at every rate, only faster."""
        timing, prompting, answering, picking, coupling = (
            np.random.default_rng([0, kind]) for kind in range(1, 6)
        )
        prompts: I64 = self.sides.prompt.draw(prompting, count)
        outputs: I64 = self.sides.output.draw(answering, count)
        if self.alike:
            outputs = coupled(prompts, outputs, self.alike, coupling)
        urgent = picking.random(count) < self.urgent
        times = arrivals(self.gaps, Steps(np.array([rate])), timing)
        drawn = zip(times, prompts.tolist(), outputs.tolist(), urgent.tolist(), strict=False)
        for at, prompt, output, first in drawn:
            yield Ask(at=at, model=MODEL, prompt=prompt, output=output, priority=-first)


SHAREGPT: Final = Traffic("ShareGPT", STAND_INS["sharegpt-gpt4"], (7.0, 7.25, 7.5, 7.75, 8.0), alike=ALIKE)
BURSTGPT: Final = Traffic("BurstGPT", STAND_INS["burstgpt"], (7.5, 7.75, 8.0, 8.25, 8.5), alike=ALIKE)
MEDIUM: Final = Traffic("M-M", STAND_INS["zipf-m"], (7.4, 7.5, 7.6, 7.7, 7.8))
LONG: Final = Traffic("L-L", STAND_INS["zipf-l"], (2.6, 2.7, 2.8, 2.9, 3.0))
SHORT: Final = Traffic("S-S", STAND_INS["zipf-s"], (26.0,))
