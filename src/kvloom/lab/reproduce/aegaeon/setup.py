"""Aegaeon's set-up: models of 6B to 14B on GPUs of 80 GB, requests at low rates, a deadline for each token.

Of the paper only what it publishes in short is known here, not its full text. That tells: 16 H800 of 80 GB in
two nodes, models of 6B to 14B, ShareGPT's lengths, Poisson arrivals of 0.1 and of 0.5 requests a second and
model, a first token within 10 s and 100 ms for each further one, and a bar of 90 % of the tokens. All else is
chosen here: which models, and in which order, the distribution of the lengths, and that models stay at their
GPU, so that each is played by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from heapq import merge
from itertools import cycle, islice
from operator import attrgetter
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.muxserve.setup import SHAREGPT
from kvloom.lab.reproduce.setup import VOCAB, TellPart, poisson_requests
from kvloom.lab.sim.content import NoContent
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.run import send_workload, slept
from kvloom.lab.sim.unit import (
    CONTEXT,
    MAX_RUNNING,
    MAX_WAITING,
    OVERLOAD,
    PARTS,
    SLEEPING,
    SimulatedUnit,
)
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import Slept
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.loading import load_bandwidth
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.plan import USABLE
from kvloom.router.program import load_program
from kvloom.types.client import Generator
from kvloom.types.job import Job
from kvloom.types.request import Event, ModelCard, StartGenerate
from kvloom.types.spec import GPU_CHUNK_TOKENS, EngineSpec, ModelSpec, Slo, shared_bytes

DEVICE: Final = "H100"
"""Its sheet is an H800's, but for NVLink, over which nothing goes here."""
SLO: Final = Slo(ttft=10.0, tpot=0.1)
BAR: Final = 0.9  # of the tokens
BUDGET: Final = int(USABLE * find_device(DEVICE).memory)
"""The bytes of a GPU for weights and K and V."""
KEPT: Final = 0.15  # of the budget, which systems whose models do not give way keep for K and V

_YI_6B: Final = structs.replace(find_shape("llama-7b"), kv_heads=4, vocab=64_000)
_QWEN_14B: Final = ModelShape(
    layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=13824, vocab=152_064
)
MODELS: Final[Mapping[str, ModelShape]] = {
    "llama3-8b": find_shape("llama3-8b"),
    "llama-13b": find_shape("llama-13b"),
    "yi-6b": _YI_6B,
    "mistral-7b": find_shape("mistral-7b"),
    "qwen2.5-14b": _QWEN_14B,
}
"""The models that a GPU has in turn: 9.8B in the mean."""


def shapes(count: int) -> dict[str, ModelShape]:
    """Returns so many models, by names of their own."""
    return {f"{n}-{name}": MODELS[name] for n, name in enumerate(islice(cycle(MODELS), count), 1)}


_BLOCK_BYTES: Final = 8 << 20  # a page, which of these models has 10 to 128 tokens
_HIDDEN: Final = 1024


def in_few_blocks(shape: ModelShape) -> ModelShape:
    """Returns a shape with as many bytes of weights, and of a token's K and V, whose pages are one block
    each: a pool counts fewer things, and has the same room."""
    numbers = shape.layers * shape.kv_heads * shape.head_dim
    rest = shape.parameters // (2 * _HIDDEN) - 2 * numbers - shape.vocab
    return ModelShape(
        layers=1,
        hidden=_HIDDEN,
        heads=1,
        kv_heads=1,
        head_dim=numbers,
        ffn=rest,
        vocab=shape.vocab,
        gated=False,
    )


def requests(models: Sequence[str], rate: float, seconds: float, seed: int) -> Iterator[WorkloadRequest]:
    """Yields Poisson requests of ShareGPT's lengths, `rate` a second and model."""
    each = (poisson_requests(model, rate, seconds, SHAREGPT.pairs, seed) for model in models)
    return merge(*each, key=attrgetter("at"))


def wanted_at_once(models: int, rate: float, seconds: float) -> float:
    """Returns how many models are expected to have a request, if each is asked `rate` times a second and a
    request takes so many seconds: all but those of whom none came for as long (the servers of an M/G/∞ queue
    are empty with probability e^-ρ)."""
    return models * -math.expm1(-rate * seconds)


class TokensInTime(NoContent):
    """Satisfies `Content`, and counts the tokens that are drawn before they are due."""

    def __init__(self, vocab: Mapping[str, int], asked: Sequence[WorkloadRequest]) -> None:
        """`asked` are the requests by their number, which is their draws' key."""
        super().__init__(vocab)
        self._asked = asked
        self.count = 0

    def draw(self, job: Job, step: int) -> list[int]:
        now = asyncio.get_running_loop().time()
        for sample in job.samples:
            due = self._asked[sample.key].at + SLO.ttft + (sample.index + step) * SLO.tpot
            self.count += now <= due
        return super().draw(job, step)


class RequestLevel:
    """Satisfies `Generator`: models take turns by requests, as in servers that switch whole models. One that
    has begun stays until all its requests have ended, also those that come meanwhile; the others wait, and
    the one that has waited longest is next."""

    def __init__(self, server: Generator, weights: Mapping[str, int], room: int) -> None:
        """`weights` are the bytes of each model's, and `room` is for the models that serve at once, beside
        the first."""
        self._server = server
        self._weights = weights
        self._room = room
        self._serving: dict[str, int] = {}  # requests by model
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by model, in the order of their first

    async def models(self) -> list[ModelCard]:
        return await self._server.models()

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self._server.abort(request, choice)

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        await self._enter(body.model)
        try:
            async with aclosing(self._server.start_generate(body)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._leave(body.model)

    async def _enter(self, model: str) -> None:
        if model in self._serving:
            self._serving[model] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(model, []).append(turn)
        self._let_in()
        await turn

    def _leave(self, model: str) -> None:
        self._serving[model] -= 1
        if not self._serving[model]:
            del self._serving[model]
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            model = next(iter(self._waiting))
            together = sum(self._weights[name] for name in (model, *self._serving))
            if self._serving and together > self._room:
                return
            turns = self._waiting.pop(model)
            self._serving[model] = len(turns)
            for turn in turns:
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class System:
    """`sleeps` says whether weights share the budget with K and V. Otherwise the GPU has the models that fit,
    and nobody serves the others. `room` is the part of the budget for models that serve at once beside the
    first, if they take turns by requests; it is None if they do not."""

    name: str
    sleeps: bool = True
    room: float | None = None


KVLOOM: Final = System("kvloom, by tokens")
ONE: Final = System("by requests, one model", room=0.0)
SEVERAL: Final = System("by requests, those that fit", room=1 - KEPT)
STATIC: Final = System("static, those that fit", sleeps=False)
SYSTEMS: Final = (KVLOOM, ONE, SEVERAL, STATIC)


def those_that_fit(every: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """Returns the first models whose weights leave room for K and V."""
    found: dict[str, ModelShape] = {}
    left = shared_bytes(BUDGET) * (1 - KEPT)
    for name, shape in every.items():
        left -= shape.weight_bytes
        if left < 0:
            break
        found[name] = shape
    return found


def make_unit(
    system: System, models: Mapping[str, ModelShape], rate: float, content: NoContent
) -> SimulatedUnit:
    """Returns a GPU with these models."""
    room = shared_bytes(BUDGET)
    spec = EngineSpec(
        models=tuple(
            ModelSpec(name=name, path="", rate=rate, slo=SLO, max_context=CONTEXT) for name in models
        ),
        kv_bytes=room if system.sleeps else room - sum(shape.weight_bytes for shape in models.values()),
        block_bytes=_BLOCK_BYTES,
        policy="adbs",
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        chunk_tokens=GPU_CHUNK_TOKENS,
        threads=PARTS,
        overload=OVERLOAD,
        device="cuda:0",
        sleep_dir=SLEEPING if system.sleeps else "",
    )
    device = find_device(DEVICE)
    cost, loads = Roofline(device, 1, models), load_bandwidth(device)
    few = {name: in_few_blocks(shape) for name, shape in models.items()}
    return SimulatedUnit(spec, few, PARTS, cost, host_bandwidth=loads, content=content)


@dataclass(frozen=True, slots=True)
class Load:
    """`models` is the number of models of a GPU, and `rate` that of each in requests a second, which come for
    `seconds`."""

    models: int
    rate: float
    seconds: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a system under a load.

    `attained` is the part of the tokens that came in time, `service` the mean seconds from a request's
    arrival to its end, over those that were answered, and `requests` the number that were asked. `slept` is
    None if nothing sleeps."""

    attained: float
    service: float
    requests: int
    slept: Slept | None


def play_load(system: System, load: Load, tell: TellPart) -> Found:
    """Plays the load to a GPU. `tell` hears which part of its requests has ended."""
    every = shapes(load.models)
    models = every if system.sleeps else those_that_fit(every)
    asked = list(requests([*every], load.rate, load.seconds, load.seed))
    served = [request for request in asked if request.model in models]
    tokens = sum(request.output for request in asked)
    in_time = TokensInTime(dict.fromkeys(models, VOCAB), served)
    unit = make_unit(system, models, load.rate, in_time)
    last = max((request.at + SLO.ttft + request.output * SLO.tpot for request in served), default=0.0)
    took: list[float] = []

    def end(result: RequestResult) -> None:
        if result.error or result.end is None:
            raise RuntimeError(f"a request at {result.request.at:.3f} s failed: {result.error}")
        took.append(result.end)
        tell(len(took) / len(served))

    async def main() -> Slept | None:
        clock = LoopClock(asyncio.get_running_loop())
        async with run_fleet([unit], load_program("least_loaded", {})) as fleet:
            weights = {name: shape.weight_bytes for name, shape in models.items()}
            server: Generator = fleet.router
            if system.room is not None:
                server = RequestLevel(server, weights, int(system.room * shared_bytes(BUDGET)))
            with suppress(TimeoutError):
                async with asyncio.timeout(last):  # no token is in time after that
                    await send_workload(server, served, Prompts(VOCAB), clock, end)
            return slept(fleet)

    told = run_virtual(main())
    service = float(np.mean(took)) if took else math.nan
    return Found(in_time.count / max(tokens, 1), service, len(served), told)
