"""Copies of prefixes in a simulated fleet: what they do to the hits of skewed and of flat workloads."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import Segment, WorkloadRequest
from kvloom.router.program import load_program
from tests.lab.sim.fleets import SHAPES, check_whole, results, unit

COMMON = 160  # tokens of a prefix
UNITS = 4
PHASE = 40.0  # seconds, in which one prefix is hot: calm at first, then a rush
KINDS = 24


def asks(hot: float, *, phases: int = 4) -> list[WorkloadRequest]:
    """hot: the part of the requests that begin with the phase's own prefix; the others begin with any."""
    draw, made = random.Random(3), []
    for phase in range(phases):
        begin = PHASE * phase
        times = [begin + 1.2 * number for number in range(24)] + [begin + 35 + 0.001 * n for n in range(16)]
        for at in times:
            kind = phase if draw.random() < hot else draw.randrange(KINDS)
            prompt = COMMON + draw.randint(1, 16)
            shared = (Segment(kind, COMMON),)
            made.append(WorkloadRequest(at=at, model="small", prompt=prompt, output=6, shared=shared))
    return made


def prompt_of(number: int, ask: WorkloadRequest) -> list[int]:
    common, own = random.Random(ask.shared[0].id), random.Random(1000 + number)
    vocab = SHAPES["small"].vocab
    return [common.randrange(vocab) for _ in range(COMMON)] + [
        own.randrange(vocab) for _ in range(ask.prompt - COMMON)
    ]


@dataclass(frozen=True)
class Played:
    hits: int
    """Tokens of the common prefixes that were not computed by the unit that answered."""
    holders: int
    """Units that hold the first phase's prefix at the end."""


def played(requests: list[WorkloadRequest], copies: int, *, blocks: int) -> Played:
    async def main() -> Played:
        units = [unit(f"unit-{number}", ("small",), blocks=blocks) for number in range(UNITS)]
        program = load_program("cache_aware", {"slack": 256, "copies": copies})
        async with run_fleet(units, program) as fleet:
            found = await results(fleet.server, requests, prompt_of)
            check_whole(fleet.engines.values())
            first = prompt_of(0, requests[0])[:COMMON]
            trees = [engine.pool.caches["small"].prefixes for engine in fleet.engines.values()]
            held = sum(tree.match(first, COMMON)[1] == COMMON for tree in trees)
        assert not any(result.error for result in found.values())
        return Played(sum(min(result.cached, COMMON) for result in found.values()), held)

    return run_virtual(main())


def test_hits_rise_under_a_skewed_workload() -> None:
    requests = asks(0.8)
    without, spread = played(requests, 1, blocks=1600), played(requests, UNITS, blocks=1600)
    assert spread.hits >= without.hits + 4 * COMMON


def test_a_flat_workload_takes_no_harm() -> None:
    requests = asks(0.0)
    for blocks in (300, 1600):
        assert played(requests, UNITS, blocks=blocks).hits >= played(requests, 1, blocks=blocks).hits


def test_surplus_copies_of_what_is_cold_are_evicted() -> None:
    requests = asks(1.0)
    assert played(requests, UNITS, blocks=1600).holders == 1
    assert played(requests, 1, blocks=1600).holders > 1
