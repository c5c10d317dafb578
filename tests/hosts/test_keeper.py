"""Keepers on hosts of their own: engines that answer other hosts, leases that end, controllers that go."""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvloom.cluster.launcher import Answered, Ended
from kvloom.router.client import HttpEngineClient
from kvloom.serve.nodes.agent import KeeperOrder
from kvloom.serve.nodes.launcher import PAUSE_SECONDS
from kvloom.serve.nodes.wire import (
    VERSION,
    Begin,
    EndOrder,
    FromKeeper,
    Granted,
    HeardAt,
    LeaseAsked,
    NodeHere,
    Refused,
    StartOrder,
    Wire,
    connect,
)
from kvloom.serve.processes.identity import FleetIdentity, calling_context
from kvloom.types.errors import HostAway, Unavailable
from kvloom.types.request import TokenEvent
from tests.checkpoints import make_checkpoint
from tests.engines import body, spec_of
from tests.hosts.hosts import Host
from tests.hosts.launchers import idle_launcher
from tests.oracle import Oracle

SECRET = "between us"
KEEPER = ("-m", "kvloom.serve.nodes.keeper_process")
LEASE = 9.0
DEADLINE = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hosts") / "m", "llama")


@dataclass
class Controller:
    """A controller of one host, as a test plays it."""

    wire: Wire[FromKeeper]
    grants: bool = True
    heard: list[object] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        async for message in self.wire.messages():
            if isinstance(message, LeaseAsked):
                if self.grants:
                    self.wire.send(Granted(message.asked))
                continue
            self.heard.append(message.heard if isinstance(message, HeardAt) else message)
            self.more.set()
        self.gone.set()

    async def first(self, kind: type) -> object:
        async with asyncio.timeout(DEADLINE):
            while True:
                for one in self.heard:
                    if isinstance(one, kind):
                        self.heard.remove(one)
                        return one
                self.more.clear()
                await self.more.wait()


@asynccontextmanager
async def controller(address: str, context: ssl.SSLContext, life: int = 1) -> AsyncIterator[Controller]:
    wire = await connect(address, context)
    wire.send(Begin(version=VERSION, life=life, lease=LEASE))
    async with asyncio.TaskGroup() as tasks:
        made = Controller(wire)
        listening = tasks.create_task(made.listen())
        yield made
        listening.cancel()
        wire.close()


@pytest.fixture
def keeper(two: list[Host], tmp_path: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """The address of a keeper at the first host, and with what it is called."""
    with keeping(two[0], tmp_path, *KEEPER) as kept:
        yield kept


@contextmanager
def keeping(
    host: Host, folder: Path, *program: str, by: signal.Signals | None = signal.SIGTERM
) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Lets a keeper run, and yields its address, and with what it is called. program: what the interpreter
    runs. by: what ends it; None: a controller has told it to end, and a signal could come after its handler
    of signals is gone."""
    identity = FleetIdentity.make()
    order = KeeperOrder(host=host.address, secret=SECRET, identity=identity, fleet="test")
    process = host.start(sys.executable, *program)
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.close()
    yield process.stdout.readline().decode().strip(), calling_context(identity.keep(folder))
    if by is not None:
        process.signal(by)
    assert process.wait(DEADLINE) == 0
    assert not host.processes()
    assert not [file for file in host.folder.rglob("*") if not file.is_dir()]


async def generated(client: HttpEngineClient, prompt: list[int], count: int) -> list[int]:
    """Returns the tokens that an engine makes."""
    frames = client.start_generate(body("m", prompt, max_tokens=count))
    return [event.token async for frame in frames for event in frame if isinstance(event, TokenEvent)]


def test_an_engine_answers_another_host(two: list[Host], tmp_path: Path, checkpoint: Path) -> None:
    """Afterwards the keeper is told to end."""
    prompt = [5, 6, 7]

    async def play(address: str, context: ssl.SSLContext) -> list[int]:
        async with controller(address, context) as here:
            assert isinstance(await here.first(NodeHere), NodeHere)
            here.wire.send(StartOrder("unit-0", 1, spec_of({"m": checkpoint}, threads=1)))
            answered = await here.first(Answered)
            assert isinstance(answered, Answered)
            client = HttpEngineClient(answered.endpoint, secret=SECRET, tls=context)
            async with client:
                tokens = await generated(client, prompt, 12)
            wrong = HttpEngineClient(answered.endpoint, secret="another", tls=context)
            async with wrong:
                with pytest.raises(Exception, match="secret"):
                    await wrong.models()
            here.wire.send(EndOrder())
            async with asyncio.timeout(DEADLINE):
                await here.gone.wait()
            return tokens

    with keeping(two[0], tmp_path, *KEEPER, by=None) as kept:
        tokens = asyncio.run(play(*kept))
    Oracle(checkpoint).check_at_once(prompt, tokens)


async def started(here: Controller, checkpoint: Path) -> str:
    """Starts the unit, and returns where it answers."""
    await here.first(NodeHere)
    here.wire.send(StartOrder("unit-0", 1, spec_of({"m": checkpoint}, threads=1)))
    answered = await here.first(Answered)
    assert isinstance(answered, Answered)
    return answered.endpoint


def test_an_engine_ends_with_its_host_s_lease(keeper: tuple[str, ssl.SSLContext], checkpoint: Path) -> None:
    async def play() -> Ended:
        async with controller(*keeper) as here:
            await started(here, checkpoint)
            here.grants = False
            ended = await here.first(Ended)
            assert isinstance(ended, Ended)
            return ended

    assert asyncio.run(play()).how == "ended with exit code 1"


def test_a_host_that_is_cut_off_for_less_than_its_lease(
    two: list[Host], keeper: tuple[str, ssl.SSLContext], checkpoint: Path
) -> None:
    """A stream stands still meanwhile, and then goes on."""
    prompt = [9, 8]

    async def play() -> list[int]:
        async with controller(*keeper) as here:
            endpoint = await started(here, checkpoint)
            async with HttpEngineClient(endpoint, secret=SECRET, tls=keeper[1]) as client:
                await client.models()
                two[0].cut_off()
                try:
                    asked = asyncio.create_task(generated(client, prompt, 16))
                    await asyncio.sleep(1.0)
                    assert not asked.done()
                finally:
                    two[0].join_again()
                return await asked

    Oracle(checkpoint).check_at_once(prompt, asyncio.run(play()))


def test_a_stream_breaks_if_its_host_is_cut_off_for_long(
    two: list[Host], keeper: tuple[str, ssl.SSLContext], checkpoint: Path
) -> None:
    """So it can go on elsewhere before the host's lease is over, which may be long."""

    async def play() -> None:
        async with controller(*keeper) as here:
            endpoint = await started(here, checkpoint)
            async with HttpEngineClient(endpoint, secret=SECRET, tls=keeper[1]) as client:
                under_way = client.start_generate(body("m", [9, 8], max_tokens=240))
                await anext(under_way)
                two[0].cut_off()
                try:
                    with pytest.raises(HostAway):
                        [frame async for frame in under_way]
                    with pytest.raises(Unavailable):
                        await generated(client, [9, 8], 16)
                finally:
                    two[0].join_again()

    asyncio.run(play())


def test_another_controller_finds_what_runs(keeper: tuple[str, ssl.SSLContext], checkpoint: Path) -> None:
    async def play() -> None:
        async with controller(*keeper, life=2) as first:
            endpoint = await started(first, checkpoint)
        async with controller(*keeper, life=3) as second:
            there = await second.first(NodeHere)
            assert isinstance(there, NodeHere)
            [found] = there.running
            assert (found.component, found.generation, found.phase) == ("unit-0", 1, "ready")
            assert found.endpoint == endpoint
            async with controller(*keeper, life=2) as late:
                refused = await late.first(Refused)
                assert isinstance(refused, Refused)
                assert "controller 3 has come" in refused.why
            async with HttpEngineClient(endpoint, secret=SECRET, tls=keeper[1]) as client:
                assert [card.name for card in await client.models()] == ["m"]

    asyncio.run(play())


def test_who_has_another_certificate_is_cut_off(keeper: tuple[str, ssl.SSLContext], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = calling_context(FleetIdentity.make().keep(other))

    async def play() -> None:
        with pytest.raises(Unavailable, match="certificate"):
            await connect(keeper[0], stranger)

    asyncio.run(play())


OF_TOMORROW = f"""
from kvloom.serve.nodes import wire
wire.VERSION = {VERSION + 1}
from kvloom.serve.nodes.keeper_process import main
main()
"""


def test_a_keeper_of_another_version_says_both(two: list[Host], tmp_path: Path) -> None:
    """The controller tells it once, however often it tries."""
    told: list[tuple[str, str]] = []

    async def play(address: str, context: ssl.SSLContext) -> None:
        unwanted = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            launcher = idle_launcher(context, tasks, told, unwanted.set, lease=LEASE)
            launcher.join("10.0.0.9", address)
            await launcher.answered()
            await asyncio.sleep(3 * PAUSE_SECONDS)  # in which it tries again
            assert not unwanted.is_set()
            await launcher.end(DEADLINE)

    with keeping(two[0], tmp_path, "-c", OF_TOMORROW) as kept:
        asyncio.run(play(*kept))
    versions = f"it speaks version {VERSION + 1}, and the controller {VERSION}"
    why = f"its keeper refuses this controller: {versions}"
    assert told == [("10.0.0.9", f"nothing can start there: {why}")]
