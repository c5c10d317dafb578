"""Gateways on hosts of their own, under keepers, for one fleet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import Counted
from kvloom.cluster.state import ALIVE, ComponentStatus, FleetSpec, UnitSpec
from kvloom.config.config import DEMO
from kvloom.config.tls import TlsFiles
from kvloom.journal.records import Noted
from kvloom.serve.local import SCHEDULER_MODULE, Heard, LocalLauncher, Role
from kvloom.serve.nodes.agent import KeeperOrder
from kvloom.serve.nodes.launcher import NodesLauncher
from kvloom.serve.processes.identity import FleetIdentity, calling_context
from kvloom.serve.processes.messages import GatewaySpec, SchedulerOrder, StartProgress
from kvloom.types.clock import WallClock
from kvloom.types.service import GroupSpec, Scale
from kvloom.types.spec import EngineSpec, ProgramSpec, SchedulerSpec
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.hosts import Host, HostProcess

SECRET, KEY, PORT = "between us", "the operator's", 8000
LEASE, DEADLINE = 30.0, 120.0
SOON, LONG = 12, 200  # events after which a gateway dies; tokens
MOST, MORE = 12_000, 50  # tokens of a stream that nobody reads to its end; events that one reads of its rest
ASKED = {
    "model": "stories",
    "prompt": "Once upon a time",
    "n": 3,
    "temperature": 0.9,
    "seed": 7,
    "max_tokens": LONG,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_event_ids": True},
}
ENDLESS = ASKED | {"model": "endless", "prompt": [1, 2, 3], "n": 1, "max_tokens": MOST}


@dataclass
class Kept:
    """A fleet's keepers on two hosts, and with what they are called. They outlive the controllers of all
    tests."""

    hosts: list[Host]
    keepers: dict[str, str]
    identity: TlsFiles
    lives: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(host.address for host in self.hosts)

    def gateways(self, host: Host) -> list[int]:
        return [pid for pid in host.processes() if b"gateway@" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    identity = FleetIdentity.make()
    with hosts_or_skip(2) as two:
        keepers = {host.address: keeper(host, identity) for host in two}
        told = {node: one.stdout.readline().decode().strip() for node, one in keepers.items()}
        yield Kept(two, told, identity.keep(tmp_path_factory.mktemp("fleet")))
        for process in keepers.values():
            process.signal(signal.SIGTERM)
        assert [process.wait(DEADLINE) for process in keepers.values()] == [0, 0]
        assert not any(host.processes() for host in two)


def keeper(host: Host, identity: FleetIdentity) -> HostProcess:
    order = KeeperOrder(host=host.address, secret=SECRET, identity=identity, fleet="test")
    process = host.start(sys.executable, "-m", "kvloom.serve.nodes.keeper_process")
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.close()
    return process


def engine(unit: str, **more: Path) -> EngineSpec:
    paths = {"stories": DEMO / "stories"} | more
    spec = spec_of(paths, threads=1, block_bytes=4 << 10, kv_bytes=(64 if more else 8) << 20)
    return replace(spec, unit=unit, transport="tcp")


def fleet_of(kept: Kept, units: dict[str, int], endless: Path | None = None, **fields: Any) -> FleetSpec:
    """units: the number of each unit's host; endless: a model that they serve too."""
    more = {} if endless is None else {"endless": endless}
    made = {name: UnitSpec(engine=engine(name, **more), node=kept.nodes[at]) for name, at in units.items()}
    return FleetSpec(on_nodes=True, units=made, **({"gateways": kept.nodes} | fields))


@dataclass
class Controlled:
    """A controller in this process, as `kvloom serve --cluster` has one."""

    controller: Controller
    launcher: NodesLauncher
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    deaf: bool = False
    """Whether it answers no edits."""
    unanswered: list[Edit] = field(default_factory=list)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def process(self, name: str) -> ComponentStatus:
        return self.controller.status.processes.get(name, ComponentStatus())

    def ready(self, *names: str) -> Callable[[], bool]:
        return lambda: all(self.process(name).phase == "ready" for name in names)

    async def end(self) -> None:
        """Ends all processes, and not the keepers."""
        there = self.controller.status.processes
        for name in list(there):
            self.launcher.stop(name)
        await self.until(lambda: not any(one.phase in ALIVE for one in there.values()))
        for name in list(there):
            self.launcher.forget(name)


class Over(Exception):
    """Ends all that a controller does, as the end of its process would."""


@asynccontextmanager
async def controlled(kept: Kept, spec: FleetSpec, *, goes: bool = False) -> AsyncIterator[Controlled]:
    """goes: whether the controller dies at the end, and leaves all behind."""
    clock = WallClock()
    folder = str(Path(kept.identity.key).parent)

    def role(component: str, _: EngineSpec | None) -> Role:
        order = SchedulerOrder(
            spec=SchedulerSpec(period=0.1), secret=SECRET, sockets=f"{folder}/s", identity=kept.identity
        )
        return Role(component, SCHEDULER_MODULE, order)

    def hear(component: str, heard: Heard) -> None:
        match heard:
            case StartProgress() | Noted():
                pass
            case Edit() if made.deaf:
                made.unanswered.append(heard)
                made.changed.set()
            case Edit():
                made.controller.answer(component, heard)
            case Counted():
                made.controller.count(component, heard)
            case _:
                made.controller.hear(heard)

    gateway = GatewaySpec(
        host="0.0.0.0",
        port=PORT,
        api_keys={},
        admin_keys=frozenset({KEY}),
        max_body=1 << 20,
        max_connections=64,
        program=ProgramSpec("data_parallel"),
        folder=folder,
        drain=5.0,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            local = LocalLauncher(role, tasks, clock, hear=hear, log=lambda *_: None)
            launcher = NodesLauncher(
                local,
                calling_context(kept.identity),
                tasks,
                clock,
                hear=hear,
                hear_node=lambda report: made.controller.hear(report),  # noqa: PLW0108 -- it is made later
                log=print,
                lease=LEASE,
                gateway=gateway,
                life=next(kept.lives),
            )
            controller = Controller(spec, launcher, clock, watch=lambda *_: made.changed.set())
            made = Controlled(controller, launcher)
            for node, address in kept.keepers.items():
                launcher.join(node, address)
            await launcher.answered()
            running = tasks.create_task(controller.run())
            yield made
            running.cancel()
            if not goes:
                await made.end()
            raise Over
    except* Over:
        pass


@dataclass
class Reader:
    """A client that keeps what it was told, and the id of its last event. most: events that it reads."""

    body: dict[str, Any] = field(default_factory=lambda: ASKED)
    most: int | None = None
    ids: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    soon: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, node: str) -> bool:
        """Returns whether the stream came to its end, or to the last event that is read."""
        headers = {"last-event-id": self.ids[-1]} if self.ids else {}
        url = f"http://{node}:{PORT}/v1/completions"
        try:
            async with (
                httpx.AsyncClient(timeout=DEADLINE) as client,
                client.stream("POST", url, json=self.body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        self.ids.append(value)
                    elif value == "[DONE]":
                        return True
                    elif name == "data":
                        self._take(json.loads(value))
                        if len(self.ids) == self.most:
                            return True
        except httpx.TransportError:
            pass  # the gateway is gone
        return False

    def _take(self, event: Any) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
        if len(self.ids) >= SOON:
            self.soon.set()


async def asked(node: str, path: str, body: object = None) -> httpx.Response:
    """Asks a gateway as its operator."""
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        url, headers = f"http://{node}:{PORT}{path}", {"authorization": f"Bearer {KEY}"}
        if body is None:
            return await client.get(url, headers=headers)
        return await client.post(url, headers=headers, json=body)


async def models(node: str) -> list[str]:
    return [model["id"] for model in (await asked(node, "/v1/models")).json()["data"]]


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play())


def test_a_stream_of_a_killed_gateway_is_resumed_at_another_host_s(kept: Kept, tmp_path: Path) -> None:
    first, second = kept.nodes
    names = [f"gateway/1@{node}" for node in kept.nodes]

    async def play() -> None:
        endless = make_checkpoint(tmp_path / "endless", "llama", max_position_embeddings=2 * MOST)
        spec = fleet_of(kept, {"unit-0": 0, "unit-1": 1}, endless)
        async with controlled(kept, spec) as fleet:
            await fleet.until(fleet.ready("unit-0", "unit-1", *names))
            assert await models(first) == await models(second) == ["stories", "endless"]
            whole, broken, other = Reader(), Reader(ENDLESS), Reader()
            assert await whole.read(second)
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(broken.read(first))
                beside = tasks.create_task(other.read(second))
                await broken.soon.wait()
                [pid] = kept.gateways(kept.hosts[0])
                os.kill(pid, signal.SIGKILL)
            assert not reading.result()
            assert beside.result()
            broken.most = len(broken.ids) + MORE
            same = Reader(ENDLESS, broken.most)
            assert await broken.read(second)
            assert await same.read(second)
            short, long = sorted((broken.texts[0], same.texts[0]), key=len)
            assert long.startswith(short)
            assert len(short) > MORE
            assert whole.texts == other.texts
            assert len(whole.texts) == 3
            await fleet.until(lambda: fleet.process(names[0]).failures == 1)
            again = Reader()
            assert await again.read(first)  # at the same address, at which it waits for the next gateway
            assert again.texts == whole.texts

    run(play)


def test_another_controller_adopts_gateways_that_served_meanwhile(kept: Kept) -> None:
    first, second = kept.nodes
    names = [f"gateway/1@{node}" for node in kept.nodes]
    spec = fleet_of(kept, {"unit-0": 0})

    async def play() -> None:
        whole, reader = Reader(), Reader()
        async with controlled(kept, spec, goes=True) as fleet:
            await fleet.until(fleet.ready("unit-0", *names))
            assert await whole.read(first)
            pids = {name: fleet.process(name).pid for name in [*names, "unit-0"]}
            reading = asyncio.create_task(reader.read(second))
            await reader.soon.wait()
            fleet.deaf = True
            asking = asyncio.create_task(asked(second, "/admin/units/unit-0/drain", {}))
            await fleet.until(lambda: bool(fleet.unanswered))
        refused = await asking
        assert refused.status_code == 503, refused.text
        assert "controller went before it had answered" in refused.json()["error"]["message"]
        assert await reading
        assert reader.texts == whole.texts
        refused = await asked(first, "/admin/units/unit-0/drain", {})
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["message"].startswith("the fleet's controller is away")
        async with controlled(kept, spec) as fleet:
            await fleet.until(fleet.ready("unit-0", *names))
            assert {name: fleet.process(name).pid for name in [*names, "unit-0"]} == pids
            drained = await asked(second, "/admin/units/unit-0/drain", {})
            assert drained.status_code == 200, drained.text
            [unit] = (await asked(first, "/admin/units")).json()
            assert unit["state"] == "drained"

    run(play)


def test_a_gateway_knows_what_a_unit_without_a_process_served_before_it(kept: Kept) -> None:
    """The unit was on another host, and the gateway's predecessor was killed."""
    first, _ = kept.nodes
    name = f"gateway/1@{first}"

    async def play() -> None:
        async with controlled(kept, fleet_of(kept, {"unit-0": 1}, gateways=(first,))) as fleet:
            await fleet.until(fleet.ready("unit-0", name))
            await stopped(fleet, "unit-0")
            [pid] = kept.gateways(kept.hosts[0])
            os.kill(pid, signal.SIGKILL)
            await fleet.until(lambda: fleet.process(name).failures == 1 and fleet.ready(name)())
            assert await cards(first, "unit-0") == ["stories"]

    run(play)


def test_a_gateway_asks_another_what_a_unit_without_a_process_has_served(kept: Kept) -> None:
    """No other test has a unit of this name, so nothing is kept of it on the second host."""
    first, second = kept.nodes

    async def play() -> None:
        async with controlled(kept, fleet_of(kept, {"known": 0}, gateways=(first,))) as fleet:
            await fleet.until(fleet.ready("known", f"gateway/1@{first}"))
            await stopped(fleet, "known")
            fleet.controller.edit(Edit(gateways=(first, second)))
            await fleet.until(fleet.ready(f"gateway/1@{second}"))
            assert await cards(second, "known") == ["stories"]

    run(play)


async def stopped(fleet: Controlled, unit: str) -> None:
    fleet.controller.edit(Edit(units={unit: UnitEdit(wanted=False)}))
    await fleet.until(lambda: fleet.process(unit).phase == "absent")


async def cards(node: str, unit: str) -> list[str]:
    return [card["name"] for card in (await asked(node, f"/admin/units/{unit}/cards")).json()]


def test_the_fleet_scheduler_hears_of_requests_at_any_gateway(kept: Kept) -> None:
    """It starts a unit for one that waits for it."""
    names = [f"gateway/1@{node}" for node in kept.nodes]
    group = GroupSpec(units=("unit-0",), scale=Scale(least=0, most=1))

    async def play() -> None:
        whole, cold = Reader(), Reader()
        async with controlled(kept, fleet_of(kept, {"unit-0": 0}, groups={"units.0": group})) as fleet:
            await fleet.until(fleet.ready("unit-0", *names))
            assert await whole.read(kept.nodes[1])
            fleet.controller.edit(Edit(scheduler=True, units={"unit-0": UnitEdit(wanted=False)}))
            await fleet.until(lambda: fleet.process("unit-0").phase == "absent")
            assert await cold.read(kept.nodes[1])
            assert cold.texts == whole.texts
            assert fleet.process("unit-0").serial == 2

    run(play)


def test_an_address_that_a_gateway_cannot_have(kept: Kept) -> None:
    first, _ = kept.nodes
    taker = kept.hosts[0].start(
        sys.executable,
        "-c",
        f"import socket; s = socket.create_server(('', {PORT})); print('here', flush=True); input()",
    )
    assert taker.stdout.readline() == b"here\n"

    async def play() -> None:
        async with controlled(kept, fleet_of(kept, {"unit-0": 0}, gateways=(first,))) as fleet:
            await fleet.until(lambda: fleet.process(f"gateway/1@{first}").phase == "failed")
            problem = fleet.process(f"gateway/1@{first}").problem
            assert problem == (
                f"port: {PORT} at 0.0.0.0: address already in use (on {first}); "
                "what each node with a gateway can listen at is right"
            )

    try:
        run(play)
    finally:
        taker.stdin.close()
        taker.wait()
