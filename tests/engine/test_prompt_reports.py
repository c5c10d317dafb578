"""Log-probabilities of a prompt: once, whole, and before any token."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvloom.api.app import create_app
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from kvloom.types.request import Event, PromptEvent
from tests.engine.plays import check, order, serve, until_in_a_job
from tests.engine.real_fleet import Fleet, spec
from tests.engines import running
from tests.modelled import ModelledExecutor, ask, engine_over, expected, surprise, turns


def test_a_preempted_choice_does_not_report_the_prompt_again() -> None:
    executor = ModelledExecutor(40, models=("wide",))
    engine = engine_over(executor, max_running=4)

    async def play() -> None:
        body = order("r", "wide", 9, n=6, max_tokens=20, prompt_logprobs=0)
        answer = await ask(engine, body)
        assert (await engine.load()).models["wide"].preemptions_total > 0
        check(executor, body, answer, whole=True)

    serve(play(), engine, executor)


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_of_one_token_is_reported_empty(n: int) -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        body = order("r", "wide", 1, n=n, prompt_logprobs=2)
        events: list[Event] = [event async for frame in engine.start_generate(body) for event in frame]
        assert events[0] == PromptEvent([])
        assert not any(isinstance(event, PromptEvent) for event in events[1:])
        silent = await ask(engine, order("r", "wide", 1, n=n))
        assert silent.prompt is None

    serve(play(), engine, executor)


@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_the_prompt_is_reported_though_the_choice_that_computes_it_is_given_up(jobs: int) -> None:
    """Before its first job, within it, and within the one that ends the prompt."""
    executor = ModelledExecutor(100)
    engine = engine_over(executor, chunk_tokens=16)

    async def play() -> None:
        body = order("r", "wide", 20, n=3, prompt_logprobs=0)
        asking = asyncio.create_task(ask(engine, body))
        await turns(2)
        if jobs:
            await until_in_a_job(executor, jobs)
        await engine.abort("r", 0)
        answer, whole = await asking, expected(executor, body)
        assert {choice: answer.tokens[choice] for choice in (1, 2)} == {1: whole[1], 2: whole[2]}
        assert answer.prompt is not None
        after = [surprise("wide", body.prompt[:i], body.prompt[i]) for i in range(1, 20)]
        assert [one.logprob for one in answer.prompt] == after

    serve(play(), engine, executor)


def test_a_prompt_of_one_token_is_echoed_with_its_logprobs(fleet: Fleet) -> None:
    """From the gateway to a real model and back, beside a longer one."""
    body: dict[str, Any] = {"model": "wide", "prompt": [[5], [5, 6]], "echo": True, "logprobs": 1}

    async def play() -> list[dict[str, Any]]:
        async with (
            running(spec(fleet)) as engine,
            Router({"unit-0": engine}, load_program("data_parallel"), WallClock()) as router,
        ):
            transport = httpx.ASGITransport(create_app(router))
            async with httpx.AsyncClient(transport=transport, base_url="http://kvloom") as http:
                answer = await http.post("/v1/completions", json=body | {"max_tokens": 2, "temperature": 0})
                assert answer.status_code == 200, answer.text
                choices: list[dict[str, Any]] = answer.json()["choices"]
                return choices

    for choice, length in zip(asyncio.run(play()), (1, 2), strict=True):
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert len(others) == length - 1 + 2
        assert all(value < 0 for value in others)
