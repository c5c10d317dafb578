"""Law 2 over units of one and of two ranks between which K and V move: streams are those of a lone engine of
one rank, whatever moves when, and whatever is given up or dies in the middle leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import ParallelExecutor, load_executor
from kvloom.router.program import load_program
from kvloom.router.programs import MOVING
from kvloom.router.router import Router
from kvloom.serve.engine import open_transport
from kvloom.types.clock import WallClock
from kvloom.types.errors import KvloomError
from kvloom.types.request import StartGenerate
from kvloom.types.spec import EngineSpec, TransportName
from kvloom.types.transfer import Transport
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, running, running_over, spec_of
from tests.modelled import turns
from tests.transfer.kinds import NIXL

RANKS = (2, 1, 2)
LONG = 40  # tokens of an answer
KINDS = [
    "shm",
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not NIXL, reason="nixl-cu13 is missing")),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two KV heads each; the second has windows, and heads of another size."""
    root = tmp_path_factory.mktemp("models")
    kinds = {"llama": {"num_hidden_layers": 2}, "gemma2": {"num_hidden_layers": 2}}
    return {name: make_checkpoint(root / name, name, **changes) for name, changes in kinds.items()}


def spec(paths: dict[str, Path], number: int, ranks: int, transport: TransportName = "shm") -> EngineSpec:
    made = spec_of(paths, threads=ranks, chunk_tokens=16)
    return replace(made, unit=f"unit-{number}", tensor_parallel=ranks, transport=transport)


def asks(seed: int, count: int) -> list[StartGenerate]:
    """Requests of all kinds; some begin as others do."""
    draw = random.Random(seed)
    base = [draw.randrange(VOCAB) for _ in range(120)]
    made = []
    for _ in range(count):
        length, fresh = draw.randint(1, 100), [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        made.append(
            body(
                draw.choice(["llama", "gemma2"]),
                base[:length] + fresh,
                n=draw.choice([1, 1, 2]),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(1000),
                max_tokens=LONG,
            )
        )
    return made


async def lone(paths: dict[str, Path], requests: list[StartGenerate]) -> list[Answer]:
    async with running(spec(paths, 0, 1)) as engine:
        return [await ask(engine, one) for one in requests]


async def moved_about(router: Router, request: StartGenerate, steps: dict[int, str]) -> Answer:
    """The answer to a request that goes to the units `steps` once it has made so many tokens, as far as it
    can."""
    answer, moves = Answer(), []
    for_now = dict(steps)
    async for frame in router.start_generate(request):
        answer.take(frame)
        made = len(answer.tokens.get(0, ()))
        for step in [step for step in for_now if step <= made]:
            moves.append(asyncio.create_task(router.move(request.request, for_now.pop(step))))
    for found in await asyncio.gather(*moves, return_exceptions=True):
        assert found is None or isinstance(found, KvloomError), found
    return answer


@pytest.mark.parametrize("transport", KINDS)
def test_streams_that_move_and_are_split(paths: dict[str, Path], transport: TransportName) -> None:
    """Under every program that moves K and V, between units of two ranks and of one; beside what the program
    does each request moves at two random steps."""
    draw = random.Random(1)

    async def test() -> None:
        requests = asks(0, 10)
        expected = await lone(paths, requests)
        async with AsyncExitStack() as stack:
            fleet: dict[str, Engine] = {}
            for i, ranks in enumerate(RANKS):
                fleet[f"unit-{i}"] = await stack.enter_async_context(
                    running(spec(paths, i, ranks, transport))
                )
            forms = [{card.name: card.form for card in await engine.models()} for engine in fleet.values()]
            assert forms[0] == forms[1] == forms[2]
            async with Router(fleet, load_program("data_parallel"), WallClock()) as router:
                for program in sorted(MOVING):
                    router.set_program(load_program(program))
                    steps = [
                        {draw.randint(1, LONG - 1): draw.choice(list(fleet)) for _ in range(2)}
                        for _ in requests
                    ]
                    found = await asyncio.gather(*map(moved_about, [router] * len(steps), requests, steps))
                    for want, got, request in zip(expected, found, requests, strict=True):
                        assert got.tokens == want.tokens, (program, request)
                loads = await router.loads()
        for name, load in loads.items():
            assert load.moves
            assert load.path == transport
            assert load.sent_bytes_total, name
            assert sum(model.received_tokens_total for model in load.models.values()), name

    asyncio.run(test())


@dataclass
class Unit:
    engine: Engine
    transport: Transport
    executor: ParallelExecutor

    async def loses_a_rank(self) -> None:
        """One dies, and the unit with it: it takes no more, and its process would end now."""
        self.executor._ranks._members[0].process.kill()
        assert "rank 1 was killed by SIGKILL" in await self.executor.lost()
        self.executor._ranks.close()

    async def prepare(self, prompt: list[int]) -> Prepared:
        return await self.engine.prep_recv(PrepRecv(model="llama", request="r", prompt=prompt, end=-1))

    async def send(self, prompt: list[int], to: Prepared) -> None:
        order = RemoteSend(
            model="llama",
            request="r",
            prompt=prompt,
            address=to.address,
            peer=to.peer,
            begin=to.matched,
            end=-1,
        )
        await self.engine.remote_send(order)

    async def under_way(self) -> None:
        """Until some bytes have gone."""
        before = self.transport.meter.bytes
        await until(lambda: self.transport.meter.bytes > before)

    async def whole(self) -> None:
        """Law 1 and law 4, in every rank: all have the same pages. A sender may hold a block for a moment."""
        await until(lambda: self.engine.pool.available == self.engine.pool.total)
        self.engine.pool.check()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await turns()


@asynccontextmanager
async def unit(made: EngineSpec) -> AsyncIterator[Unit]:
    executor = load_executor(made)
    assert isinstance(executor, ParallelExecutor)
    transport = open_transport(made, executor.arena)
    async with running_over(made, executor, transport) as engine:
        yield Unit(engine, transport, executor)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_ends_in_the_middle_leaves_nothing(paths: dict[str, Path], transport: TransportName) -> None:
    """A send is given up by its sender, by its receiver, and by whoever asked for it, and goes on afterwards;
    then a rank of the receiver dies in the middle of one, and a rank of the sender."""
    draw = random.Random(2)

    def prompt() -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(200)]

    async def gone_wrong(source: Unit, target: Unit, end: Callable[[asyncio.Task[None]], object]) -> bool:
        """Whether a send that ended so in the middle has failed."""
        tokens = prompt()
        spot = await target.prepare(tokens)
        sending = asyncio.create_task(source.send(tokens, spot))
        await source.under_way()
        what = end(sending)
        if asyncio.iscoroutine(what):
            await what
        [outcome] = await asyncio.gather(sending, return_exceptions=True)
        assert outcome is None or isinstance(outcome, KvloomError | asyncio.CancelledError), outcome
        await target.engine.abort("r")
        return outcome is not None

    async def test() -> None:
        tokens = prompt()
        async with running(spec(paths, 9, 1)) as engine:
            expected = await ask(engine, body("llama", tokens, max_tokens=8))
        async with unit(spec(paths, 0, 2, transport)) as p, unit(spec(paths, 1, 2, transport)) as d:
            for end in (
                lambda _: p.engine.abort("r"),
                lambda _: d.engine.abort("r"),
                lambda sending: sending.cancel(),
            ):
                assert await gone_wrong(p, d, end)
                await p.whole()
                await d.whole()
            spot = await d.prepare(tokens)
            await p.send(tokens, spot)
            wanted = replace(body("llama", tokens, max_tokens=8), request="r", begin=-1)
            answer = await ask(d.engine, wanted)
            assert answer.tokens == expected.tokens
            assert (await d.engine.load()).models["llama"].received_tokens_total >= len(tokens) - 1

            with suppress(KvloomError):
                await gone_wrong(p, d, lambda _: d.loses_a_rank())
            await p.whole()
            await d.whole()
            async with unit(spec(paths, 2, 2, transport)) as e:
                assert await gone_wrong(p, e, lambda _: p.loses_a_rank())
                await e.whole()
                await p.whole()
                answer = await ask(e.engine, body("llama", tokens, max_tokens=8))
                assert answer.tokens == expected.tokens

    asyncio.run(test())
