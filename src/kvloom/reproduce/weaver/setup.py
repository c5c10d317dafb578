"""Weaver's set-up (section 5): two Llama-3-8B, a hot and a cold one, on two GPUs that decode.

Prefills are done by GPUs of their own, as in the paper, and are not simulated: prompts come computed. What
the paper does not tell is set once, for all of its figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.devices import Device, find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import Operated, Operator, Work
from kvloom.types.geometry import I64
from kvloom.types.job import Phase
from kvloom.types.spec import EngineSpec, ModelSpec, Policy, WeaveSpec
from kvloom.workload.arrivals import Steps, arrivals, poisson
from kvloom.workload.ask import Ask
from kvloom.workload.stand_ins import STAND_INS, Sides

MODEL: Final = "llama3-8b"
HOT: Final = "hot"
COLD: Final = "cold"
COLD_RATE: Final = 1.0  # requests a second, where the paper has section 2.3's cold model
LONGEST: Final = 2048  # tokens of a sequence; longer ones the paper leaves out
TAKEN: Final = 8.0e9  # bytes of a GPU that hold neither weights nor K and V: see `pool_bytes`
VOCAB: Final = 32_000  # of the prompts

_PAGE: Final = 32  # tokens: blocks of 16 KiB hold as many
_MAX_RUNNING: Final = 256  # vLLM's
_MAX_WAITING: Final = 1 << 20  # nobody is turned away
_PARTS: Final = 10  # that a GPU's compute is shared out in, as MuxServe does
_LEAST: Final = 1 / _PARTS  # of the compute, for a prefill that computes nothing
_AT_ONCE: Final = 1024


class Decoder:
    """Satisfies `Operated`: of a GPU to which prompts come computed."""

    def __init__(self, cost: Operated) -> None:
        self._cost = cost

    @property
    def start(self) -> float:
        return self._cost.start

    @property
    def poll(self) -> float:
        return self._cost.poll

    def shape(self, model: str) -> ModelShape:
        return self._cost.shape(model)

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        decodes = [other for other in beside if other.phase is Phase.DECODE]
        return self._cost.seconds(work, decodes) if work.phase is Phase.DECODE else 0.0

    def operators(self, work: Work) -> tuple[Operator, ...]:
        return self._cost.operators(work) if work.phase is Phase.DECODE else ()

    def queued(self, work: Work) -> float:
        return self._cost.queued(work) if work.phase is Phase.DECODE else 0.0

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        return self._cost.attention(model, shape, rows, context)


def pool_bytes(device: Device, gpus: int, models: int) -> int:
    """What weights leave. TAKEN is such that the paper's 118 sequences of Azure's lengths use 88.9 % of what
    an A100 of 40 GB has left (section 5.1)."""
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
    """Where it has several models, rates are theirs, and shares those of their decode steps."""
    sheet, shape = find_device(device), find_shape(MODEL)
    page = structs.replace(
        shape, layers=1, kv_heads=1, head_dim=shape.layers * shape.kv_heads * shape.head_dim
    )  # pages of one block: pools count fewer things, and the same room
    block_bytes = _PAGE * shape.kv_bytes
    room = pool_bytes(sheet, gpus, len(models)) // block_bytes * block_bytes
    given = tuple(
        ModelSpec(name=one, path="", max_context=LONGEST, rate=rate, prefill_share=_LEAST, decode_share=part)
        for one, part, rate in zip(models, shares, rates, strict=False)
    )
    spec = EngineSpec(
        models=given,
        kv_bytes=room,
        block_bytes=block_bytes,
        policy=policy,
        max_running=_MAX_RUNNING,
        max_waiting=_MAX_WAITING,
        chunk_tokens=4 * LONGEST,
        threads=_PARTS,
        unit=name,
        overload=0.2,
        weave=weave,
    )
    cost = Decoder(Roofline(sheet, gpus, dict.fromkeys(models, shape)))
    return SimulatedUnit(spec, dict.fromkeys(models, page), _PARTS, cost, bandwidth=sheet.link / 2)


@dataclass(frozen=True, slots=True)
class Trace:
    """sides: what its lengths are like. prompt, output: their means once sequences that are too long are left
    out, as the paper tells them."""

    name: str
    sides: Sides | None
    prompt: int
    output: int

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Lengths of prompts and of answers, without end."""
        while True:
            prompts, outputs = self._draw(rng)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)

    def _draw(self, rng: np.random.Generator) -> tuple[I64, I64]:
        if self.sides is None:
            return np.full(_AT_ONCE, self.prompt), np.full(_AT_ONCE, self.output)
        prompts, outputs = (side.draw(rng, 4 * _AT_ONCE) for side in self.sides)
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


def asks(trace: Trace, hot: float, cold: float, seconds: float) -> Iterator[Ask]:
    """Poisson, at these rates. What the one is asked does not depend on the other."""
    each = (_asks(trace, model, rate, seconds) for model, rate in ((HOT, hot), (COLD, cold)) if rate)
    return merge(*each, key=attrgetter("at"))


def _asks(trace: Trace, model: str, rate: float, seconds: float) -> Iterator[Ask]:
    timing, sizing = (np.random.default_rng([0, kind, *model.encode()]) for kind in (1, 2))
    pairs = trace.pairs(sizing)
    for at in arrivals(poisson, Steps(np.array([rate])), timing):
        if at >= seconds:
            return
        prompt, output = next(pairs)
        yield Ask(at=at, model=model, prompt=prompt, output=output)
