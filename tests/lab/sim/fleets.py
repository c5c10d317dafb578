"""Small fleets in virtual time, and the results of the requests that were played to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from kvloom.engine.engine import Engine
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.run import PromptOf, send_workload
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import RequestResult, Segment, WorkloadRequest
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program
from kvloom.types.client import Generator
from kvloom.types.job import Phase
from kvloom.types.load import UnitLoad
from kvloom.types.spec import EngineSpec, ModelSpec, Policy

SHAPES = {
    "small": ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=500),
    "deep": ModelShape(layers=5, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=900),
}


P = ParamSpec("P")
T = TypeVar("T")


def virtually(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Runs a test in virtual time."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


class Plain:
    """Satisfies `CostModel`: a job takes 1 ms, 0.1 ms a token and a little for its context, less with a
    larger share, more beside others."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        per_token = 1e-4 if work.phase is Phase.PREFILL else 5e-5
        alone = 1e-3 + per_token * work.tokens / work.share + 1e-7 * work.context
        return alone * (1.0 + 0.25 * len(beside))


def unit(
    name: str = "unit-0",
    models: Sequence[str] = tuple(SHAPES),
    *,
    blocks: int = 400,
    policy: Policy = "adbs",
    compute: int = 4,
    ranks: int = 1,
    device: str = "cpu",
) -> SimulatedUnit:
    spec = EngineSpec(
        models=tuple(ModelSpec(name=model, path="", max_context=256) for model in models),
        kv_bytes=blocks * 1024,
        block_bytes=1024,
        policy=policy,
        max_running=16,
        max_waiting=1000,
        chunk_tokens=64,
        threads=compute,
        unit=name,
        tensor_parallel=ranks,
        device=device,
    )
    return SimulatedUnit(spec, {model: SHAPES[model] for model in models}, compute, Plain())


def asks(
    count: int, *, seed: int, rate: float, models: Sequence[str] = tuple(SHAPES)
) -> list[WorkloadRequest]:
    draw, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        prompt, output = draw.randint(1, 120), draw.randint(1, 90)
        made.append(WorkloadRequest(at=at, model=draw.choice(models), prompt=prompt, output=output))
    return made


def talks(count: int, *, seed: int, rate: float, kinds: int = 4) -> list[WorkloadRequest]:
    """As `asks`, but each prompt begins as many others of its model do."""
    draw, made = random.Random(seed), []
    for ask in asks(count, seed=seed, rate=rate):
        kind = draw.randrange(kinds)
        common = Segment(kind + kinds * (ask.model == "deep"), 16 + 8 * kind)
        made.append(msgspec.structs.replace(ask, prompt=ask.prompt + common.tokens, shared=(common,)))
    return made


def prompt_of(number: int, ask: WorkloadRequest) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(SHAPES[ask.model].vocab) for _ in range(ask.prompt)]


def outcomes(
    units: Sequence[SimulatedUnit],
    played: Sequence[WorkloadRequest],
    *,
    program: str = "data_parallel",
    seed: int = 0,
    prompts: PromptOf = prompt_of,
) -> tuple[dict[WorkloadRequest, RequestResult], dict[str, UnitLoad]]:
    """By ask, and every unit's load at the end, when laws 1 and 4 hold."""

    async def main() -> tuple[dict[WorkloadRequest, RequestResult], dict[str, UnitLoad]]:
        async with run_fleet(units, load_program(program)) as fleet:
            found = await results(fleet.server, played, prompts)
            await asyncio.sleep(60)  # leases end
            loads = {name: await engine.load() for name, engine in fleet.engines.items()}
            check_whole(fleet.engines.values())
        return found, loads

    return run_virtual(main(), seed=seed)


async def results(
    server: Generator, played: Sequence[WorkloadRequest], prompts: PromptOf = prompt_of
) -> dict[WorkloadRequest, RequestResult]:
    """Plays the requests to a server that is there. Returns their results by request."""
    found: dict[WorkloadRequest, RequestResult] = {}

    def tell(result: RequestResult) -> None:
        found[result.request] = result

    await send_workload(server, played, prompts, LoopClock(asyncio.get_running_loop()), tell)
    return found


def check_whole(engines: Iterable[Engine]) -> None:
    """Asserts that all blocks of the engines are free, and law 1."""
    for engine in engines:
        engine.pool.check()
        assert engine.pool.lent == 0
        assert engine.pool.available == engine.pool.total
