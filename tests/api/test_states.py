"""What a gateway tells of its units, whatever state they are in, and of what units that lend wait for."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx
import pytest
from msgspec.structs import replace

from kvloom.api.app import create_app
from kvloom.api.metrics import Metrics
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.errors import Unavailable
from kvloom.types.load import Waits
from kvloom.types.service import NO_PROCESS, Service
from tests.api.fleet import Curt
from tests.cluster.loads import unit
from tests.router.fleets import ManualClock

GONE = Curt(fails=lambda _: Unavailable("the engine cannot be reached"))


def bring(router: Router, name: str, state: Service, stack: ExitStack) -> None:
    found = router.units[name]
    if state in ("draining", "drained"):
        router.units[name].withdraw()
    if state == "draining":
        found.begin_call()
        stack.callback(found.end_call)
    if state in ("restarting", "starting", "down", "away"):
        found.stand(state, drained=False, life=None, problem=None)


def told(path: str, *states: Service) -> httpx.Response:
    """By a gateway whose units are in these states."""
    engines = {
        f"unit-{number}": GONE if state in NO_PROCESS else Curt() for number, state in enumerate(states)
    }

    async def asked() -> httpx.Response:
        async with Router(engines, load_program("data_parallel"), ManualClock()) as router:
            transport = httpx.ASGITransport(create_app(router))
            with ExitStack() as stack:
                for name, state in zip(engines, states, strict=True):
                    bring(router, name, state, stack)
                async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                    return await client.get(path)

    return asyncio.run(asked())


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (("up", "drained"), "ok"),
        (("down", "up"), "ok"),
        (("restarting", "up", "draining"), "ok"),
        (("restarting", "drained", "down"), "restarting"),
        (("drained", "down", "draining"), "down"),
        (("away", "starting"), "starting"),
        (("away", "drained"), "away"),
        (("away", "up"), "ok"),
    ],
)
def test_health(states: tuple[Service, ...], status: str) -> None:
    answer = told("/health", *states)
    assert answer.status_code == 200
    units = {f"unit-{number}": state for number, state in enumerate(states)}
    assert answer.json() == {"status": status, "units": units}


def test_no_unit_takes_requests() -> None:
    answer = told("/health", "drained", "draining")
    assert answer.status_code == 503
    said = "no engine takes requests: unit-0 is drained, unit-1 is draining"
    assert answer.json()["error"]["message"] == said


def test_a_fleet_without_units_says_so() -> None:
    async def asked() -> list[httpx.Response]:
        async with Router({}, load_program("data_parallel"), ManualClock()) as router:
            transport = httpx.ASGITransport(create_app(router))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                completion = {"model": "x", "prompt": "x"}
                return [
                    await client.get("/health"),
                    await client.get("/v1/models"),
                    await client.post("/v1/completions", json=completion),
                ]

    for answer in asyncio.run(asked()):
        assert answer.status_code == 503
        said = answer.json()["error"]["message"]
        assert said.endswith("the fleet has no unit; `kvloom config apply` adds some")


@pytest.mark.parametrize(("drained", "status"), [(False, 200), (True, 503)])
def test_a_unit_that_died_while_it_was_drained_is_not_waited_for(drained: bool, status: int) -> None:
    async def asked() -> int:
        async with Router({"unit-0": GONE}, load_program("data_parallel"), ManualClock()) as router:
            router.units["unit-0"].stand("down", drained=drained, life=None, problem=None)
            transport = httpx.ASGITransport(create_app(router))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return (await client.get("/health")).status_code

    assert asyncio.run(asked()) == status


def test_metrics() -> None:
    """A unit that is drained still tells what it holds."""
    states: tuple[Service, ...] = ("up", "drained", "draining", *NO_PROCESS)
    lines = told("/metrics", *states).text.splitlines()
    assert "kvloom_engines_up 1.0" in lines
    for number, state in enumerate(states):
        for other in states:
            line = f'kvloom_unit_state{{state="{other}",unit="unit-{number}"}} {float(other == state)}'
            assert line in lines
        tells = f'kvloom_kv_blocks{{unit="unit-{number}"}} 8.0' in lines
        assert tells == (state not in NO_PROCESS)


def test_waits_are_told_by_the_model_and_as_measured() -> None:
    waits = Waits(
        tasks_total=5,
        ahead=0.125,
        parts=61,
        service=0.25,
        wait=1.0,
        beyond=2.0,
        stall=3.0,
        expected_wait=4.0,
        expected_beyond=5.0,
        expected_stall=6.0,
    )
    loads = {"a": replace(unit(), waits=waits), "b": unit()}
    text = Metrics().render(loads, {"a": "up", "b": "up"}, {}, {}).decode()
    told = [line for line in text.splitlines() if line.startswith("kvloom_weave_wait_seconds{")]
    assert told == [
        f'kvloom_weave_wait_seconds{{source="{source}",unit="a",wait="{name}"}} {value}'
        for name, values in {"wait": (1.0, 4.0), "beyond": (2.0, 5.0), "stall": (3.0, 6.0)}.items()
        for source, value in zip(("measured", "expected"), values, strict=True)
    ]
