"""A whole run against an endpoint of made-up answers: when requests go out, and what comes of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from kvloom.lab.bench.endpoint import ServerError
from kvloom.lab.bench.run import ALL, Bench, Run
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.request import Prompts, Within
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.spec import VOCAB
from kvloom.lab.workload.traces import VERSION, Header, write_workload
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError
from tests.lab.bench.server import Answer, Seen, serving, stream, whole
from tests.lab.workload.specs import asks
from tests.processes import DEADLINE

HEADER = Header(kvloom_workload=VERSION, name="w", models=("a", "b"))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """20 requests in a second or so."""
    write_workload(tmp_path / "w.jsonl", HEADER, asks(requests=20, seconds=...))
    return tmp_path / "w.jsonl"


async def benched(
    workload: Path, answer: Answer = whole, served: tuple[str, ...] | None = ("a", "b"), **changes: Any
) -> tuple[Results, Seen]:
    async with serving(answer, served) as seen:
        given: dict[str, Any] = {
            "url": seen.url,
            "key": None,
            "workload": workload,
            "rate_scale": 1.0,
            "models": {},
            "form": "tokens",
            "exact": True,
            "vocab": None,
            "timeout": DEADLINE,
            "bounds": None,
            "scales": (),
        }
        run = Run(**(given | changes))
        results = await Bench(run, open_workload(workload), Console(quiet=True), WallClock()).results()
        return results, seen


def bench(workload: Path, *arguments: Any, **changes: Any) -> tuple[Results, Seen]:
    return asyncio.run(benched(workload, *arguments, **changes))


def asked(seen: Seen, workload: Path) -> list[dict[str, Any]]:
    """The bodies in the order of the workload; those that were sent close to each other may come in any."""
    prompts = Prompts(VOCAB)
    by_prompt = {tuple(body["prompt"]): body for body in seen.bodies}
    return [by_prompt[tuple(prompts(i, ask))] for i, ask in enumerate(open_workload(workload).requests())]


def test_all_is_asked_and_answered(workload: Path) -> None:
    results, seen = bench(workload)
    sent = list(open_workload(workload).requests())
    bodies = asked(seen, workload)
    assert len(seen.bodies) == 20
    assert [body["max_tokens"] for body in bodies] == [ask.output for ask in sent]
    assert [body["model"] for body in bodies] == [ask.model for ask in sent]
    assert results.source == "benchmark"
    assert (results.total.requests, results.total.errors) == (20, 0)
    assert results.total.output_tokens == sum(ask.output for ask in sent)
    assert results.total.cached_tokens == 20
    assert results.lateness is not None
    assert 0 <= results.lateness.most < DEADLINE


def test_nobody_waits_for_an_answer(workload: Path) -> None:
    """Open loop: no answer comes before every request is there."""
    every = asyncio.Event()
    count = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 20:
            every.set()
        await every.wait()
        return await whole(request, body)

    results, _ = bench(workload, answer)
    assert results.total.errors == 0


def test_models_by_the_names_that_the_server_has(workload: Path) -> None:
    _, seen = bench(workload, whole, ("x", "y"), models={"a": "x", ALL: "y"})
    names = [body["model"] for body in asked(seen, workload)]
    assert names == [{"a": "x", "b": "y"}[ask.model] for ask in open_workload(workload).requests()]


def test_objectives(workload: Path) -> None:
    results, seen = bench(workload, bounds=Within(first=DEADLINE), scales=(1e-9, 1e9))
    assert results.total.attained == {"in time": 1.0, "≤ 1e-09×": 0.0, "≤ 1e+09×": 1.0}
    probes = len(seen.bodies) - 20
    assert probes == 12
    prompts = [tuple(body["prompt"]) for body in seen.bodies]
    assert len(set(prompts)) == len(prompts), "no probe warms a cache for another request"


def test_errors_are_told(workload: Path) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["model"] == "b":
            return web.json_response({"error": {"message": "busy"}}, status=429)
        return await whole(request, body)

    results, _ = bench(workload, answer)
    assert results.errors == {"status 429: busy": results.models["b"].requests}
    assert results.models["a"].errors == 0


def test_a_model_that_is_not_there_ends_it_before_anything_is_sent(workload: Path) -> None:
    with pytest.raises(ConfigError, match=r"model `b` is not served at .*, which has a; `--model b=NAME` is"):
        bench(workload, whole, ("a",))
    with pytest.raises(ConfigError, match=r"--model c: .* asks for a, b"):
        bench(workload, models={"c": "a"})
    results, _ = bench(workload, whole, None)
    assert results.total.errors == 0, "an endpoint that lists nothing is asked all the same"


def test_a_bad_line_ends_it_before_anything_is_sent(workload: Path) -> None:
    with workload.open("ab") as file:
        file.write(b"nonsense\n")
    seen = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        return await whole(request, body)

    with pytest.raises(ConfigError, match="line 22: "):
        bench(workload, answer)
    assert seen == 0


def test_a_probe_that_fails_ends_it(workload: Path) -> None:
    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await stream(request)

    with pytest.raises(ServerError, match="a: alone, too: the stream ended"):
        bench(workload, answer, scales=(5.0,))
