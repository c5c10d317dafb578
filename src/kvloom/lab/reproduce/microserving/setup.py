"""LLM Microserving's set-up (section 4): Llama-3.1-8B on A100-40, one GPU an engine.

What the paper does not tell is set once, for all of its figures: the number of requests, the rates, the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.lab.reproduce.report import Scale
from kvloom.lab.reproduce.setup import VOCAB, engine_spec
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.workload.arrivals import Steps, arrivals, poisson
from kvloom.lab.workload.lengths import LogNormal, Normal, Sides
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import Latency
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cluster import Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import pool_bytes
from kvloom.router.program import load_program
from kvloom.types.geometry import I64
from kvloom.types.spec import ModelSpec, ProgramSpec

MODEL: Final = "llama3-8b"
DEVICE: Final = "A100-40"
REQUESTS: Final[Mapping[Scale, int]] = {"full": 300, "small": 60}
LINK: Final = 22e9  # bytes a second: what Llumnix (OSDI 2024) saw of a PCIe 4.0 link of 32 GB/s

_BLOCK_BYTES: Final = 16 << 10  # 32 tokens of a KV head of a layer


@dataclass(frozen=True, slots=True)
class Pattern:
    """The router's program, and the number of GPUs."""

    name: str
    gpus: int
    program: ProgramSpec


def balance(ratio: float) -> Pattern:
    return Pattern(f"balance {ratio:g}", 2, ProgramSpec("balanced", {"prefill": 1, "ratio": ratio}))


DATA_PARALLEL: Final = Pattern("DP", 2, ProgramSpec("data_parallel"))
ONE_ONE: Final = Pattern("1P1D", 2, ProgramSpec("disaggregate", {"prefill": 1}))
ONE_ONE_BALANCE: Final = Pattern("1P1D-balance", 2, balance(0.2).program)
ONE_TWO: Final = Pattern("1P2D", 3, ProgramSpec("disaggregate", {"prefill": 1}))


# Means of about 200 and 260 tokens; the spread is that of kvloom's other stand-ins of ShareGPT.
SHAREGPT: Final = Sides(LogNormal(132, 1.4, 4, 1024), LogNormal(167, 1.0, 4, 2044))


def synthetic(prompt: int) -> Sides:
    """Lengths around `prompt` and 100 tokens, with a standard deviation of 5."""
    return Sides(Normal(prompt, 5), Normal(100, 5))


@dataclass(frozen=True, slots=True)
class Point:
    """The times to the first token, between tokens, and to the last one (the job completion time), in
    seconds."""

    first: Latency
    per_token: Latency
    end: Latency


def units(count: int) -> list[SimulatedUnit]:
    """Returns units of one GPU each. Jobs run one at a time on the whole of it, as the paper's engine runs
    them."""
    device, shapes = find_device(DEVICE), {MODEL: find_shape(MODEL)}
    kv_bytes = pool_bytes(Nodes(DEVICE, device.memory, 1, 1).mesh(1), shapes.values())
    cost, models = Roofline(device, 1, shapes), [ModelSpec(name=MODEL, path="")]
    return [
        SimulatedUnit(
            engine_spec(f"gpu-{i}", models, kv_bytes=kv_bytes, block_bytes=_BLOCK_BYTES),
            shapes,
            1,
            cost,
            bandwidth=LINK,
        )
        for i in range(count)
    ]


def run_point(
    pattern: Pattern, lengths: Sides, rate: float, requests: int, tell: Callable[[RequestResult], None]
) -> Point:
    """Requests come as a Poisson process, `rate` a second for each GPU. The same requests come to every
    pattern, only faster if it has more GPUs."""
    results = simulate(
        units(pattern.gpus),
        load_program(pattern.program.name, pattern.program.options),
        _requests(lengths, rate * pattern.gpus, requests),
        Prompts(VOCAB),
        Summary(),
        title=pattern.name,
        tell=tell,
    )
    total = results.total
    if total.errors or total.first is None or total.per_token is None or total.end is None:
        raise RuntimeError(f"{pattern.name}: {total.errors} of {total.requests} failed: {results.errors}")
    return Point(total.first, total.per_token, total.end)


def _requests(lengths: Sides, rate: float, requests: int) -> Iterator[WorkloadRequest]:
    timing, sizing = np.random.default_rng([0, 1]), np.random.default_rng([0, 2])
    prompts: I64 = lengths.prompt.draw(sizing, requests)
    outputs: I64 = lengths.output.draw(sizing, requests)
    times = arrivals(poisson, Steps(np.array([rate])), timing)
    for at, prompt, output in zip(times, prompts.tolist(), outputs.tolist(), strict=False):
        yield WorkloadRequest(at=at, model=MODEL, prompt=prompt, output=output)
