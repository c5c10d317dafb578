"""Weaver's set-up (section 5): two Llama-3-8B, a hot and a cold one, on two GPUs that decode.

Prefills are done by GPUs of their own, as in the paper, and are not simulated: prompts come computed. What
the paper does not tell is set once, for all of its figures. What is compared stands at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from operator import attrgetter
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.muxserve.setup import in_runtime
from kvloom.lab.reproduce.setup import AT_ONCE, engine_spec, in_one_layer, poisson_requests
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.workload.lengths import STAND_INS, Sides
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.plan.cost.devices import DeviceSpec, find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import Operated, Operator, Work
from kvloom.types.geometry import I64
from kvloom.types.job import Phase
from kvloom.types.spec import Control, ModelSpec, Policy, Splitting, WeaveSpec

MODEL: Final = "llama3-8b"
HOT: Final = "hot"
COLD: Final = "cold"
COLD_RATE: Final = 1.0  # requests a second, where the paper has section 2.3's cold model
LONGEST: Final = 2048  # tokens of a sequence; longer ones the paper leaves out
TAKEN: Final = 8.0e9  # bytes of a GPU that hold neither weights nor K and V: see `pool_bytes`

_PAGE: Final = 32  # tokens: blocks of 16 KiB hold as many
_PARTS: Final = 10  # that a GPU's compute is shared out in, as MuxServe does
_LEAST: Final = 1 / _PARTS  # of the compute, for a prefill that computes nothing


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
        threads=_PARTS,
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


def weave(share: float, control: Control = "operators", split: Splitting = "auto") -> WeaveSpec:
    """The relation of the cold unit to the hot one."""
    return WeaveSpec(COLD, share, PART, control=control, split=split, waits=WAITS)


@dataclass(frozen=True, slots=True)
class System:
    """units: on GPUs of a kind, for requests a second of the hot and of the cold model."""

    name: str
    units: Callable[[str, float, float], list[SimulatedUnit]]


def dedicated(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Gives each model a GPU."""
    return [unit(HOT, device, [HOT]), unit(COLD, device, [COLD])]


def bare_temporal(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Returns the units of `temporal`, in a runtime that adds nothing to the device's time."""
    return [unit("both", device, [HOT, COLD], gpus=2, rates=(hot, cold))]


def bare_multiplexed(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Returns the units of `multiplexed`, in a runtime that adds nothing to the device's time."""
    return [unit("both", device, [HOT, COLD], gpus=2, policy="adbs", shares=SHARES, rates=(hot, cold))]


def temporal(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Puts both models on both GPUs, by turns on the whole of them."""
    return [_in_muxserve(one) for one in bare_temporal(device, hot, cold)]


def multiplexed(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Puts both models on both GPUs, side by side, with MuxServe's batching, quotas and processes of fixed
    shares."""
    return [_in_muxserve(one) for one in bare_multiplexed(device, hot, cold)]


def _in_muxserve(made: SimulatedUnit) -> SimulatedUnit:
    """Adds what MuxServe's runtime adds to a step, as in the experiments of its own paper."""
    return replace(made, cost=in_runtime(made.cost, made.spec, {HOT: SIZE, COLD: SIZE}))


def woven(spec: WeaveSpec) -> Callable[[str, float, float], list[SimulatedUnit]]:
    """Gives each model a GPU, and offloads a part of the hot model's sequences."""

    def units(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
        return [unit(HOT, device, [HOT], weave=spec), unit(COLD, device, [COLD])]

    return units


def sharing(share: float) -> System:
    """Returns Weaver with another share."""
    return System(f"Weaver, {100 * share:.0f} %", woven(weave(share)))


DEDICATED: Final = System("dedicated", dedicated)
MUXSERVE: Final = System("MuxServe", multiplexed)
TEMPORAL: Final = System("Mux-Temporal", temporal)
BARE_MUXSERVE: Final = System("MuxServe, bare", bare_multiplexed)
BARE_TEMPORAL: Final = System("Mux-Temporal, bare", bare_temporal)
WEAVER: Final = System("Weaver", woven(weave(SHARE)))
