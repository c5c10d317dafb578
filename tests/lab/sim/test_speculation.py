"""Speculation in virtual time: drafts are right as often as is said, and engines find out how many pay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from kvloom.lab.sim.content import JobFailed, NoContent
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.speculation import seconds_per_token
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program
from kvloom.types.job import Job
from kvloom.types.load import ModelLoad
from kvloom.types.spec import ModelSpec
from tests.engines import Answer, ask, body
from tests.lab.sim.fleets import check_whole, now, unit

VOCAB = 600
SHAPES = {
    "large": ModelShape(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=VOCAB),
    "draft": ModelShape(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=VOCAB),
}


class Steps:
    """Satisfies `CostModel`: a step of a model takes so many milliseconds, and a 32nd of that more for each
    row."""

    def __init__(self, draft: float) -> None:
        self._milliseconds = {"large": 10.0, "draft": draft}

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._milliseconds[work.model] * (1.0 + work.tokens / 32) / 1000


def pair(
    how: str, acceptance: float, *, draft: float = 1.0, blocks: int = 3000, content: NoContent | None = None
) -> SimulatedUnit:
    made = unit(models=())
    models = (
        ModelSpec(name="large", path="", max_context=2048, speculation=how, acceptance=acceptance),
        ModelSpec(name="draft", path="", max_context=2048),
    )
    spec = structs.replace(made.spec, models=models, kv_bytes=blocks * 1024)
    return replace(made, spec=spec, shapes=SHAPES, cost=Steps(draft), content=content)


def text(acceptance: float) -> NoContent:
    return NoContent(dict.fromkeys(SHAPES, VOCAB), {"large": acceptance})


def play(made: SimulatedUnit, asked: Sequence[tuple[int, int]]) -> tuple[list[Answer], float, ModelLoad]:
    """Asks all requests (tokens of prompt and output) at once. Returns the answers, the virtual seconds until
    the last has come, and what the large model counts."""

    async def main() -> tuple[list[Answer], float, ModelLoad]:
        async with run_fleet([made], load_program("data_parallel")) as fleet:
            (engine,) = fleet.engines.values()
            began, answers = now(), list[Answer]()
            bodies = [
                body("large", [(7 * n + i) % VOCAB for i in range(prompt)], max_tokens=output, seed=n)
                for n, (prompt, output) in enumerate(asked)
            ]
            answers = await asyncio.gather(*(ask(engine, one) for one in bodies))
            took, load = now() - began, (await engine.load()).models["large"]
            check_whole(fleet.engines.values())
        return answers, took, load

    return run_virtual(main(), seed=0)


PLAIN = Steps(1.0).seconds(Work.decode("large", 1.0, [1]))  # of a token without drafts


@pytest.mark.parametrize(
    ("acceptance", "draft"), [(0.6, 1.0), (0.8, 1.0), (0.95, 1.0), (0.8, 4.0), (0.95, 4.0)]
)
def test_a_request_has_the_pace_that_the_cost_model_says(acceptance: float, draft: float) -> None:
    _, took, load = play(pair("draft", acceptance, draft=draft), [(1, 1500)])
    said = seconds_per_token(Steps(draft), "large", 1.0, [750], acceptance, "draft")
    assert took / 1500 == pytest.approx(said, rel=0.1)
    assert said < 0.85 * PLAIN
    assert load.accepted_tokens_total > 300


@pytest.mark.parametrize(
    ("acceptance", "draft"), [(0.01, 1.0), (0.3, 1.0), (0.3, 4.0), (0.6, 8.0), (0.9, 20.0)]
)
def test_where_drafts_hardly_pay_they_cost_little(acceptance: float, draft: float) -> None:
    _, took, _ = play(pair("draft", acceptance, draft=draft), [(1, 1500)])
    assert took / 1500 < PLAIN * 1.03


def test_n_grams_find_what_comes_again() -> None:
    _, took, load = play(pair("ngram", 0.95), [(1, 1000)])
    assert load.accepted_tokens_total > 500
    assert took < 1000 * PLAIN / 2


class Fails(NoContent):
    """Jobs that have drafts fail, as the seed has it."""

    def __init__(self, acceptance: float, odds: float) -> None:
        super().__init__(dict.fromkeys(SHAPES, VOCAB), {"large": acceptance})
        self._draw, self._odds = random.Random(1), odds

    def draw(self, job: Job, step: int) -> list[int]:
        if job.draft_steps is not None and self._draw.random() < self._odds:
            raise JobFailed("told to")
        return super().draw(job, step)


@pytest.mark.parametrize("how", ["draft", "ngram"])
def test_streams_are_those_without_drafts_in_a_crowd(how: str) -> None:
    asked = [(20 + 5 * n, 90) for n in range(24)]
    plain, _, _ = play(pair("none", 0.0, content=text(0.8)), asked)
    found, _, load = play(pair(how, 0.8, blocks=800), asked)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert load.preemptions_total
    assert load.accepted_tokens_total


def test_jobs_that_fail_leave_no_block_of_the_model_that_drafts() -> None:
    answers, _, _ = play(pair("draft", 0.8, content=Fails(0.8, 0.3)), [(9, 2 + 3 * n) for n in range(12)])
    reasons = {end.reason for one in answers for end in one.ends.values()}
    assert reasons == {"error", "length"}
