"""Aegaeon's setting in small: its arithmetic, its systems, and which tokens count as in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest

from kvloom.lab.reproduce.aegaeon.pooling import (
    ACTIVE,
    ASKED,
    MARKET,
    SERVICE,
    Sweep,
    arithmetic,
    drawn_at_once,
    most,
    pooling,
    told,
)
from kvloom.lab.reproduce.aegaeon.setup import (
    KVLOOM,
    MODELS,
    ONE,
    SLO,
    STATIC,
    SYSTEMS,
    Found,
    Load,
    RequestLevel,
    in_few_blocks,
    play_load,
    requests,
    shapes,
    those_that_fit,
    wanted_at_once,
)
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.results import Slept
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.request import Event, ModelCard, SamplingParams, StartGenerate
from tests.lab.reproduce.played import played, quiet


def test_the_published_arithmetic() -> None:
    """The paper tells 46.55 for a rate that it rounds to 0.037."""
    assert wanted_at_once(MARKET, ASKED, SERVICE) == pytest.approx(ACTIVE, rel=0.01)
    assert wanted_at_once(7, 1e9, 1.0) == 7.0


def test_drawn_arrivals_keep_as_many_models_active() -> None:
    expected = wanted_at_once(MARKET, ASKED, SERVICE)
    assert drawn_at_once(MARKET, ASKED, SERVICE, 5_000.0) == pytest.approx(expected, rel=0.02)
    assert [cell.verdict for cell in played(arithmetic).cells] == ["agrees", "agrees"]


def test_a_model_is_asked_the_same_whatever_others_there_are() -> None:
    few, many = (
        [one for one in requests([*shapes(count)], 0.5, 60.0, 0) if one.model == "1-llama3-8b"]
        for count in (1, 7)
    )
    assert few == many != []
    times = [one.at for one in requests([*shapes(7)], 0.5, 60.0, 0)]
    assert all(a <= b for a, b in pairwise(times))


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_few_blocks_have_the_same_room(shape: ModelShape) -> None:
    few = in_few_blocks(shape)
    assert few.kv_bytes == shape.kv_bytes
    assert few.weight_bytes == pytest.approx(shape.weight_bytes, rel=1e-5)


class Slow:
    """A server that takes a second for each request, and notes when it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []

    async def models(self) -> list[ModelCard]:
        return []

    async def abort(self, request: str, choice: int | None = None) -> None:
        """Nobody asks for it."""

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        self.asked.append((asyncio.get_running_loop().time(), body.model))
        await asyncio.sleep(1.0)
        yield []


def begun(room: int) -> list[tuple[float, str]]:
    """When requests begin: of a and b at 0 s, of c and of a again at 0.5 s, where models weigh 10."""
    server = Slow()
    front = RequestLevel(server, {"a": 10, "b": 10, "c": 10}, room)

    async def ask(at: float, model: str) -> None:
        await asyncio.sleep(at)
        body = StartGenerate(
            model=model, request=f"{model}{at}", prompt=[1], sampling=SamplingParams(max_tokens=1, seed=0)
        )
        async for _ in front.start_generate(body):
            pass

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for at, model in ((0.0, "a"), (0.0, "b"), (0.5, "c"), (0.5, "a")):
                group.create_task(ask(at, model))

    run_virtual(main())
    return server.asked


def test_a_model_stays_until_its_requests_have_ended() -> None:
    assert begun(room=0) == [(0.0, "a"), (0.5, "a"), (1.5, "b"), (2.5, "c")]
    assert begun(room=20) == [(0.0, "a"), (0.0, "b"), (0.5, "a"), (1.0, "c")]


def test_static_gpus_serve_the_models_that_fit_and_no_other() -> None:
    every = shapes(10)
    fit = those_that_fit(every)
    assert [*every][: len(fit)] == [*fit]
    assert 2 <= len(fit) < 7
    found = play_load(STATIC, Load(10, 0.1, 20.0), quiet)
    asked = [*requests([*every], 0.1, 20.0, 0)]
    theirs = sum(one.output for one in asked if one.model in fit)
    assert found.slept is None
    assert found.attained == pytest.approx(theirs / sum(one.output for one in asked))


def test_a_light_load_is_in_time_and_a_heavy_one_is_not() -> None:
    light = play_load(KVLOOM, Load(5, 0.1, 20.0), quiet)
    assert light.attained == 1.0
    assert light.slept is not None
    assert light.slept.wakes >= 3
    heavy = play_load(ONE, Load(9, 0.5, 20.0), quiet)
    assert heavy.attained < 0.9
    assert heavy.service > light.service
    assert (SLO.ttft, SLO.tpot) == (10.0, 0.1)


def test_the_most_models_are_those_above_the_bar() -> None:
    found = {count: Found(attained, 1.0, 1, None) for count, attained in ((3, 1.0), (5, 0.9), (7, 0.89))}
    assert most(found) == 5
    assert most({3: found[7]}) == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "verdicts"),
    [
        ({3: 1.0, 7: 1.0}, {3: 1.0, 7: 0.5}, ["holds", "holds", "holds"]),  # 7 over 3, at least
        ({3: 1.0, 7: 1.0}, {3: 1.0, 7: 1.0}, ["holds", "cannot tell", "cannot tell"]),  # both at the end
        ({3: 1.0, 7: 0.5}, {3: 1.0, 7: 0.5}, ["fails", "cannot tell", "cannot tell"]),  # 6 at most, over 3
        ({3: 0.5}, {3: 1.0, 7: 0.5}, ["fails", "fails", "fails"]),
    ],
)
def test_a_grid_that_cannot_tell_says_so(
    ours: dict[int, float], theirs: dict[int, float], verdicts: list[str]
) -> None:
    climbed = {
        one.name: {
            count: Found(
                part, 1.0, 1, Slept(wakes=0, sleeps=0, waited=0, wait=None) if one is KVLOOM else None
            )
            for count, part in (ours if one is KVLOOM else theirs).items()
        }
        for one in SYSTEMS
    }
    report = told([Sweep(0.1, 40.0, (3, 7))], {0.1: climbed})
    assert [claim.verdict for claim in report.claims] == verdicts


def test_the_sweep_in_small() -> None:
    report = played(pooling)
    assert len(report.claims) == 3
    assert [grid.heads for grid in report.grids[1:2]] == [("", "3", "7")]
    assert "up to 7 models per GPU" in [claim.said for claim in report.claims if claim.holds]
