"""Streams under fire: every one must be what a lone engine says.

python -m benchmarks.under_fire [--models 10 --memory 12]

Three engine processes that are started again when they die, and a router in this process. One of them is
killed with -9 every few seconds, and requests that run are moved to and fro all the while. Requests have
several choices, guides, stop tokens, penalties and seeds among them. Prints how many streams, kills and moves
there were, and what was wrong; ends with 1 where anything was.

With several models, which differ in their weights, each request is for one of them. With --memory (MiB) each
engine has that for the weights and the pool of all, so that models sleep and wake, and every other kill comes
while a model that slept is being asked for: 0 to 20 ms after the request. The lone engine has them all awake.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from kvloom.cluster.controller import Controller
from kvloom.cluster.launcher import Answered, Ended, Missed, Started
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import ComponentStatus, FleetSpec, UnitSpec
from kvloom.config.config import DEMO
from kvloom.lab.sim.fleet import forward_to_controller
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.serve.local import ENGINE_MODULE, Heard, LocalLauncher, Role
from kvloom.serve.processes.messages import EngineOrder
from kvloom.types.client import Generator
from kvloom.types.clock import WallClock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Guide, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec, ModelSpec
from kvloom.types.verbs import Prefix

MODEL: Final = "stories"
GATEWAY: Final = "gateway/1"
VOCAB: Final = 700
SCHEMA: Final = (
    '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 80}}, "required": ["a"]}'
)
SHOWN: Final = 20  # lines of what was wrong
ALONE: Final = 32  # requests at a time at the lone engine
WEIGHTS: Final = "model.safetensors"
OFF: Final = 0.05  # by which part a weight of another model differs, on the whole
LEASE: Final = 2.0  # seconds of a reservation, so that what is left behind is soon given back


@dataclass(frozen=True, slots=True)
class Effort:
    """longest: tokens of an answer. at_once: streams at a time. pause: seconds between two kills. movers: who
    move requests, each one at a time. memory: bytes of an engine's weights and pool; 0: none sleeps."""

    streams: int = 1000
    longest: int = 240
    at_once: int = 32
    engines: int = 3
    pause: float = 4.0
    movers: int = 4
    seed: int = 0
    models: int = 1
    memory: int = 0

    @property
    def names(self) -> list[str]:
        return [MODEL, *(f"{MODEL}-{i}" for i in range(1, self.models))]


@dataclass(slots=True)
class Answer:
    """tokens, and why each choice ended. problem: the error that ended it, or what was wrong with its
    events."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    problem: str = ""

    async def read(self, server: Generator, body: StartGenerate) -> None:
        try:
            async with aclosing(server.start_generate(body)) as frames:
                async for frame in frames:
                    for event in frame:
                        self._take(event)
        except KvloomError as error:
            self.problem = error.message

    def _take(self, event: object) -> None:
        if isinstance(event, TokenEvent):
            tokens = self.tokens.setdefault(event.choice, [])
            if event.index != len(tokens) or event.choice in self.ends:
                self.problem = f"choice {event.choice}: token {event.index} after {len(tokens)}"
            tokens.append(event.token)
        elif isinstance(event, EndEvent):
            self.ends[event.choice] = event.reason, event.stop_token


@dataclass(slots=True)
class Fought:
    """What became of it. wrong: one line each."""

    streams: int = 0
    tokens: int = 0
    kills: int = 0
    moves: int = 0
    at_wakes: int = 0  # kills that came as a model that slept had been asked for
    wakes: int = 0  # of the processes that were there at the end
    stayed: Counter[str] = field(default_factory=Counter)  # why, without numbers
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def asked(effort: Effort) -> list[StartGenerate]:
    """Requests of every kind."""
    draw, of = random.Random(effort.seed), random.Random(f"{effort.seed}/models")
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.9, "stop_token_ids": tuple(range(300, VOCAB, 40))},
        {"temperature": 0.8, "frequency_penalty": 0.6, "top_p": 0.9},
        {"temperature": 0.9, "guide": Guide("json_schema", SCHEMA)},
        {"temperature": 0.7, "logprobs": 1},
    ]
    bodies = []
    for i in range(effort.streams):
        params = {"max_tokens": draw.randint(10, effort.longest), "seed": draw.randrange(2**31)} | kinds[
            i % len(kinds)
        ]
        bodies.append(
            StartGenerate(
                model=of.choice(effort.names),
                request=f"fire-{i}",
                prompt=[draw.randrange(300, VOCAB) for _ in range(draw.randint(1, 300))],
                n=draw.choice((1, 1, 3)),
                sampling=SamplingParams(**params),  # type: ignore[arg-type]
            )
        )
    return bodies


class Engines:
    """Processes that are kept alive. clients: of each."""

    def __init__(self, folder: str, specs: Callable[[str], EngineSpec]) -> None:
        """specs: an engine's, by its name."""
        self._spec = specs
        self.clients: dict[str, HttpEngineClient] = {}
        self.pids: dict[str, int] = {}  # of those that answer
        self._folder = folder
        self._secret = secrets.token_urlsafe(16)
        self._names: list[str] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self, names: list[str]) -> AsyncIterator[None]:
        self._names, clock = names, WallClock()
        timing = Timing(first=0.1, most=0.1)
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            launcher = LocalLauncher(self._role, group, clock, hear=self._hear, log=lambda *_: None)
            fleet = FleetSpec(units={name: UnitSpec(engine=self._spec(name)) for name in names}, gateway=0)
            self._controller = Controller(fleet, launcher, clock, timing=timing, watch=self._watch)
            controller = self._controller
            self._mirror = Mirror(
                controller.snapshot, lambda said: forward_to_controller(controller, GATEWAY, said)
            )
            controlling = group.create_task(self._controller.run())
            for name in names:
                client = HttpEngineClient(f"unix://{self._path(name)}", secret=self._secret)
                self.clients[name] = await stack.enter_async_context(client)
            await self.all_answer()
            try:
                yield
            finally:
                controlling.cancel()
                await launcher.end(10.0)

    @property
    def link(self) -> FleetLink:
        """What a router knows of them: that of the controller."""
        return FleetLink(self._mirror, self.clients.__getitem__)

    def kill(self, name: str) -> bool:
        """With -9, where it answers and is not the only one that does."""
        if name not in self.pids or len(self.pids) < 2:
            return False
        os.kill(self.pids.pop(name), signal.SIGKILL)
        return True

    async def all_answer(self) -> None:
        while len(self.pids) < len(self._names):
            self._news.clear()
            await self._news.wait()

    def _path(self, name: str) -> str:
        return str(Path(self._folder) / f"{name}.sock")

    def _role(self, name: str, engine: EngineSpec | None) -> Role:
        assert engine is not None
        order = EngineOrder(spec=engine, socket=self._path(name), secret=self._secret)
        return Role(name, ENGINE_MODULE, order)

    def _hear(self, name: str, heard: Heard) -> None:
        if isinstance(heard, Started | Answered | Ended | Missed):
            self._controller.hear(heard)

    def _watch(self, name: str, before: ComponentStatus, process: ComponentStatus) -> None:
        match process.phase:
            case "ready" if process.pid is not None:
                self.pids[name] = process.pid
            case "waiting":
                self.pids.pop(name, None)
            case "failed":
                raise RuntimeError(f"{name} {process.problem}")
        self._mirror.heed(self._controller.snapshot)
        self._news.set()


def _checkpoints(folder: str, names: list[str]) -> tuple[ModelSpec, ...]:
    """The demo's model, and others of its shape: each weight is a little off, by a seed."""
    models = [ModelSpec(name=MODEL, path=str(DEMO / MODEL))]
    for seed, name in enumerate(names[1:], 1):
        path = Path(folder) / name
        shutil.copytree(DEMO / MODEL, path)
        tensors, noise = load_file(path / WEIGHTS), torch.Generator().manual_seed(seed)
        for key, tensor in tensors.items():
            off = torch.randn(tensor.shape, generator=noise) * OFF
            tensors[key] = (tensor * (1 + off)).to(tensor.dtype)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})
        models.append(ModelSpec(name=name, path=str(path)))
    return tuple(models)


def _spec(name: str, models: tuple[ModelSpec, ...], memory: int, folder: str) -> EngineSpec:
    return EngineSpec(
        models=models,
        kv_bytes=memory or len(models) * (24 << 20),
        sleep_dir=folder if memory else "",
        block_bytes=4 << 10,
        policy="adbs",
        max_running=64,
        max_waiting=2000,
        chunk_tokens=256,
        threads=1,
        unit=name,
        lease=LEASE,
    )


async def fight(effort: Effort, console: Console) -> Fought:
    bodies, fought = asked(effort), Fought(streams=effort.streams)
    names = [f"unit-{i}" for i in range(effort.engines)]
    with tempfile.TemporaryDirectory() as folder:
        models = _checkpoints(folder, effort.names)
        alone = Engines(folder, partial(_spec, models=models, memory=0, folder=folder))
        async with alone.running(["lone"]):
            whole = await _answers(alone.clients["lone"], bodies, ALONE)
        console.print("the lone engine has answered", style="dim")
        engines = Engines(folder, partial(_spec, models=models, memory=effort.memory, folder=folder))
        began = time.perf_counter()
        async with engines.running(names):
            router = Router(engines.link, load_program("data_parallel"), WallClock())
            async with router, asyncio.TaskGroup() as group:
                foes = [group.create_task(_kill(engines, names, effort, fought))]
                foes += [
                    group.create_task(_move(router, names, effort.seed + i, fought))
                    for i in range(effort.movers)
                ]
                found = await _answers(router, bodies, effort.at_once)
                for foe in foes:
                    foe.cancel()
            await engines.all_answer()
            fought.wrong += await _left(engines, effort.names)
            fought.wakes = await _wakes(engines)
        fought.seconds = time.perf_counter() - began
    for body, one, other in zip(bodies, whole, found, strict=True):
        fought.tokens += sum(map(len, one.tokens.values()))
        fought.wrong += _unlike(body, one, other)
    return fought


async def _answers(server: Generator, bodies: list[StartGenerate], at_once: int) -> list[Answer]:
    answers, limit = [Answer() for _ in bodies], asyncio.Semaphore(at_once)

    async def one(answer: Answer, body: StartGenerate) -> None:
        async with limit:
            await answer.read(server, body)

    async with asyncio.TaskGroup() as group:
        for answer, body in zip(answers, bodies, strict=True):
            group.create_task(one(answer, body))
    return answers


async def _kill(engines: Engines, names: list[str], effort: Effort, fought: Fought) -> None:
    draw = random.Random(effort.seed)
    for number in itertools.count():
        await asyncio.sleep(effort.pause)
        name = draw.choice(names)
        at_wake = number % 2 == 1 and effort.memory > 0
        asking = await _ask_sleeping(engines.clients[name], draw) if at_wake else None
        killed = engines.kill(name)
        fought.kills += killed
        if asking is not None:
            fought.at_wakes += killed
            await asking  # the answer ends with the process; its tokens count for nothing


async def _ask_sleeping(client: HttpEngineClient, draw: random.Random) -> asyncio.Task[None] | None:
    """Asks for a model that sleeps, and returns 0 to 20 ms later; returns None if all are awake, or the
    engine does not answer."""
    try:
        load = await client.load()
    except KvloomError:
        return None
    asleep = [name for name, model in load.models.items() if model.weights and not model.weights.awake]
    if not asleep:
        return None
    params = SamplingParams(max_tokens=10, temperature=0.0, seed=1)
    body = StartGenerate(
        model=draw.choice(asleep), request=f"wake-{draw.randrange(2**31)}", prompt=[300], sampling=params
    )
    asking = asyncio.create_task(Answer().read(client, body))
    await asyncio.sleep(draw.uniform(0.0, 0.02))
    return asking


async def _wakes(engines: Engines) -> int:
    """Returns how many wakes the processes have had that are there now."""
    loads = [await client.load() for client in engines.clients.values()]
    return sum(m.weights.wakes_total for load in loads for m in load.models.values() if m.weights)


async def _move(router: Router, names: list[str], seed: int, fought: Fought) -> None:
    """Requests drawn from those that are there, each to a unit drawn."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(draw.uniform(0.0, 0.02))
        running = list(router.sessions)
        if not running:
            continue
        try:
            await router.move(draw.choice(running), draw.choice(names))
            fought.moves += 1
        except KvloomError as error:
            fought.stayed[type(error).__name__ + ": " + re.sub(r"\S*\d\S*", "…", error.message)] += 1


def _unlike(body: StartGenerate, one: Answer, other: Answer) -> list[str]:
    wrong = [f"{body.request}: {answer.problem}" for answer in (one, other) if answer.problem]
    for choice in range(body.n):
        whole, found = one.tokens.get(choice, []), other.tokens.get(choice, [])
        if whole != found:
            pairs = enumerate(itertools.zip_longest(whole, found))
            at, (was, came) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            wrong.append(f"{body.request}, choice {choice}: token {at} is {came} instead of {was}")
        elif one.ends.get(choice) != other.ends.get(choice):
            ended, wanted = other.ends.get(choice), one.ends.get(choice)
            wrong.append(f"{body.request}, choice {choice}: ends with {ended}, not {wanted}")
    return wrong


async def _left(engines: Engines, models: list[str]) -> list[str]:
    """Units of which some blocks have no owner, after two leases."""
    await asyncio.sleep(2 * LEASE)
    wrong = []
    for name, client in engines.clients.items():
        for model in models:
            with suppress(KvloomError):
                await client.evict(Prefix(model=model, prompt=[]))
        load = await client.load()
        weights = sum(model.weights.blocks for model in load.models.values() if model.weights)
        if left := load.total_blocks - load.free_blocks - weights:
            wrong.append(f"{name}: {left} blocks are nobody's")
    return wrong


def main() -> None:
    usual = Effort()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--longest", type=int, default=usual.longest, help="tokens of an answer, at most")
    parser.add_argument("--at-once", type=int, default=usual.at_once)
    parser.add_argument("--engines", type=int, default=usual.engines)
    parser.add_argument("--pause", type=float, default=usual.pause, help="seconds between two kills")
    parser.add_argument("--models", type=int, default=usual.models)
    parser.add_argument("--memory", type=float, default=0.0, help="MiB of an engine's weights and pool")
    parser.add_argument("--seed", type=int, default=usual.seed)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # each kill has many
    console = Console()
    effort = Effort(
        streams=options.streams,
        longest=options.longest,
        at_once=options.at_once,
        engines=options.engines,
        pause=options.pause,
        seed=options.seed,
        models=options.models,
        memory=int(options.memory * (1 << 20)),
    )
    fought = asyncio.run(fight(effort, console))
    console.print(
        f"{fought.streams} streams of {fought.tokens} tokens in {fought.seconds:.0f} s: {fought.kills} "
        f"kills ({fought.at_wakes} at a waking), {fought.moves} moves ({fought.stayed.total()} stayed), "
        f"{fought.wakes} wakes by those that live, {len(fought.wrong)} wrong"
    )
    for why, times in fought.stayed.most_common(SHOWN):
        console.print(f"  {times} stayed: {why}", markup=False, style="dim")
    for line in fought.wrong[:SHOWN]:
        console.print(f"  {line}", markup=False, style="red")
    sys.exit(1 if fought.wrong else 0)


if __name__ == "__main__":
    main()
