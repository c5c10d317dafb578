"""Whatever a program holds is given back, wherever and however its request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from kvloom.router import Call, Fleet, Frames, held
from kvloom.router.program import Program
from kvloom.router.programs import PROGRAMS
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.request import Event, StartGenerate
from tests.router.fleets import Fleets, ask, ask_well, begin, body, routed, turns
from tests.router.ledger import Called

FAULTS = [
    Unavailable("the engine cannot be reached: broken"),
    OutOfBlocks("no room"),
    QueueFull("4 requests wait already", retry_after=1),
    BadRequest("its lease ran out"),
    KvloomError("a bug"),
]
UNKNOWING = ("unavailable", "internal_error")  # after which the verb may have been done
PROMPT = 40


@asynccontextmanager
async def busy(units: int, program: str) -> AsyncIterator[Fleets]:
    """Part of PROMPT is cached somewhere, where much is to be done: with two units, those programs that send
    do so."""
    options = {"ratio": 0.05} if program == "balanced" else {}
    async with routed(units, program, **options) as fleets:
        await ask_well(fleets.router, body(32))
        home = fleets.journal[-1].unit
        fleets.journal.clear()
        with fleets.waiting(home, 1000):
            yield fleets
            await turns()
            assert not fleets.world.held


async def failure(fleets: Fleets, request: StartGenerate) -> KvloomError | None:
    """None where it is answered well."""
    try:
        await ask_well(fleets.router, request)
    except KvloomError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("fault", "after"),
    [(fault, False) for fault in FAULTS] + [(fault, True) for fault in FAULTS if fault.code in UNKNOWING],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, Exception) else "after" if value else "before"
    ),
)
@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_verb_that_fails(program: str, units: int, after: bool, fault: KvloomError) -> None:
    """At every call in turn: the answer is whole where another replica could give it, else an error."""
    for at in range(4):
        async with busy(units, program) as fleets:
            world = fleets.world
            world.fault, world.fault_at, world.fault_after = fault, at, after
            error = await failure(fleets, body(PROMPT))
            if error is not None:
                failed = fleets.journal[at]
                assert failed.verb == "start_generate"
                assert failed.begin == 0
                assert units == 1 or not isinstance(fault, Unavailable | OutOfBlocks | QueueFull)
                assert fault.message in error.message
                assert "\n" not in error.message
            assert not world.held
            world.fault_at = -1
            await ask_well(fleets.router, body(PROMPT))  # and all goes on


async def test_faults_reach_every_verb() -> None:
    """Of the test above: its prompts do make the programs send."""
    for program in ("disaggregate", "cache_aware_disaggregate", "balanced", "migrate_context"):
        async with busy(2, program) as fleets:
            await ask_well(fleets.router, body(PROMPT))
            verbs = [call.verb for call in fleets.journal]
            assert verbs == ["prep_recv", "remote_send", "start_generate"], program


@pytest.mark.parametrize("again", [0, 1, 2, 3], ids=lambda turn: f"again after {turn}" if turn else "once")
@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_request_that_is_cancelled(program: str, units: int, again: int) -> None:
    """At every turn of the event loop, and cancelled again while it is being cancelled."""
    for turn in range(1000):
        async with busy(units, program) as fleets:
            task = asyncio.create_task(ask_well(fleets.router, body(PROMPT)))
            await turns(turn)
            over = task.done()
            task.cancel()
            if again:
                await turns(again)
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await turns()
            assert not fleets.world.held
        if over:
            assert turn > 2
            return


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_stream_that_is_closed_early(program: str) -> None:
    """After every frame. The engine's stream is closed before `aclose` returns, and nobody is asked again."""
    for frames in range(1, 5):
        async with busy(2, program) as fleets:
            stream = fleets.router.start_generate(body(PROMPT))
            async with aclosing(stream):
                for _ in range(frames):
                    await anext(stream)
                assert [what for what in fleets.world.held if "stream" in what]
            assert not fleets.world.held
            assert not [abort for engine in fleets.engines for abort in engine.aborts]


async def test_a_receiver_that_dies_during_a_send() -> None:
    async with routed(2, "disaggregate") as fleets:
        _, receiver = fleets.engines
        task = await fleets.begin_send(body(PROMPT), pace=5)
        receiver.down = True
        await task
        assert [call.unit for call in fleets.journal[2:]] == ["a"]
        assert fleets.router.services == {"a": "up", "b": "down"}  # though it was the sender that told
        receiver.restart()
        await turns()


async def test_a_sender_that_dies_half_way() -> None:
    async with routed(2, "disaggregate") as fleets:
        sender, receiver = fleets.engines
        task = await fleets.begin_send(body(PROMPT), pace=5)
        sender.down = True
        await task
        assert [call.unit for call in fleets.journal[2:]] == ["b"]
        assert receiver.aborts  # the room was given back before it generated
        assert fleets.router.services == {"a": "down", "b": "up"}


async def test_a_request_that_is_wrong_is_refused_once() -> None:
    async with routed(3) as fleets:
        for engine in fleets.engines:
            engine.refusal = BadRequest("prompt token 1000 is not in m's vocabulary", param="prompt")
        with pytest.raises(BadRequest, match="vocabulary") as error:
            await ask(fleets.router, body())
        assert error.value.param == "prompt"
        assert len(fleets.journal) == 1
        assert not [abort for engine in fleets.engines for abort in engine.aborts]


async def test_queues_that_are_full_are_all_tried() -> None:
    async with routed(3) as fleets:
        for engine in fleets.engines:
            engine.refusal = QueueFull("4 requests wait already", retry_after=7)
        with pytest.raises(QueueFull) as error:
            await ask(fleets.router, body())
        assert error.value.retry_after == 7
        assert sorted(call.unit for call in fleets.journal) == ["a", "b", "c"]
        fleets.engines[2].refusal = None
        await ask_well(fleets.router, body())


async def test_the_lease_is_renewed_while_a_send_runs() -> None:
    async with routed(2, "disaggregate") as fleets:
        _, receiver = fleets.engines
        task = await fleets.begin_send(body(PROMPT), pace=500)
        await fleets.clock.advance(5.5)
        assert receiver.renewals == 5
        await task
        await fleets.clock.advance(10)
        assert receiver.renewals == 5


async def test_a_lease_that_ran_out_ends_the_send() -> None:
    async with routed(2, "disaggregate") as fleets:
        sender, receiver = fleets.engines
        task = await fleets.begin_send(body(PROMPT), pace=500)
        receiver.rooms.clear()
        await fleets.clock.advance(1)
        assert not sender.sending
        assert sender.aborts
        await task
        assert [call.verb for call in fleets.journal] == ["prep_recv", "remote_send", "start_generate"]


async def test_an_abort_reaches_an_engine_beside_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(2, "disaggregate") as fleets:
        sender, receiver = fleets.engines
        answers = asyncio.Event()
        real = receiver.abort

        async def late(request: str, choice: int | None = None) -> None:
            await answers.wait()
            await real(request, choice)

        request = body(PROMPT)
        task = await fleets.begin_send(request, pace=500)
        monkeypatch.setattr(receiver, "abort", late)
        aborting = await begin(fleets.router.abort(request.request))
        assert sender.aborts
        answers.set()
        await aborting
        with suppress(KvloomError):
            await task


async def test_an_engine_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "RELEASE_SECONDS", 0.01)
    async with routed(2, "disaggregate") as fleets:
        sender, receiver = fleets.engines

        async def never(request: str, choice: int | None = None) -> None:
            await asyncio.Event().wait()

        sender.pace, aborts = 500, receiver.abort
        monkeypatch.setattr(receiver, "abort", never)
        task = asyncio.create_task(ask_well(fleets.router, body(PROMPT)))
        while not sender.sending:
            await turns(1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert sender.aborts  # the one does not wait for the other
        await aborts(sender.aborts[0][0])  # as its lease would


async def wasteful(call: Call, fleet: Fleet) -> Frames:
    """Reserves everywhere, sends back and forth, and generates twice."""
    first, second, third = fleet.up
    spots = [await call.prep_recv(replica, end=-1) for replica in (first, second, third)]
    async with asyncio.TaskGroup() as group:
        for spot in spots[:2]:
            group.create_task(call.remote_send(third, spot))
    async for frame in call.start_generate(first, begin=-1):
        yield frame
        if frame:
            break
    stream = call.start_generate(second)
    await anext(stream)


async def test_a_wasteful_program_leaves_nothing_behind() -> None:
    program = Program("wasteful", wasteful, {})
    for turn in range(1, 60):
        async with routed(3, program) as fleets:
            task = asyncio.create_task(ask(fleets.router, body(PROMPT)))
            await turns(turn)
            task.cancel()
            with suppress(asyncio.CancelledError, KvloomError):
                await task
    for at in range(7):
        async with routed(3, program) as fleets:
            fleets.world.fault, fleets.world.fault_at = Unavailable("broken"), at
            with suppress(KvloomError, ExceptionGroup):
                await ask(fleets.router, body(PROMPT))


async def crashing(call: Call, fleet: Fleet) -> AsyncGenerator[list[Event], None]:
    await call.prep_recv(fleet.turn(), end=-1)
    raise ZeroDivisionError
    yield []


async def silent(call: Call, fleet: Fleet) -> AsyncGenerator[list[Event], None]:
    await call.prep_recv(fleet.turn(), end=-1)
    return
    yield []


async def test_a_program_with_a_bug() -> None:
    async with routed(2, Program("crashing", crashing, {})) as fleets:
        await ask_well(fleets.router, body())
        assert not fleets.world.held
        fleets.router.set_program(Program("silent", silent, {}))
        with pytest.raises(KvloomError, match="the program silent ended without an answer"):
            await ask(fleets.router, body())
        assert not fleets.world.held
        assert [call.verb for call in fleets.journal] == ["prep_recv", "start_generate", "prep_recv"]


async def test_the_sides_of_a_send_differ_in_form() -> None:
    async with routed(2, "disaggregate") as fleets:
        replica = fleets.router.units["a"].replicas["m"]
        assert replica.card.form is not None
        unlike = type(replica.card.form)(
            layers=1, kv_heads=1, head_dim=8, dtype="float16", block_bytes=256, tokens_per_block=8
        )
        fields = {name: getattr(replica.card, name) for name in replica.card.__struct_fields__}
        replica.card = type(replica.card)(**(fields | {"form": unlike}))
        await ask_well(fleets.router, body())
        assert fleets.journal[0] == Called("b", "prep_recv", None, -1)
        assert [call.verb for call in fleets.journal] == ["prep_recv", "start_generate"]
