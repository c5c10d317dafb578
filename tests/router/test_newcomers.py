"""Units that are added and removed while the router serves."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.kv.prefix_index import PrefixIndex
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.router.unit import Unit
from kvloom.types.client import EngineClient
from kvloom.types.errors import BadRequest, Conflict, QueueFull, Unavailable, UnknownModel
from kvloom.types.request import ModelCard
from kvloom.types.service import Scale
from tests.router.fleets import ManualClock, ask, ask_well, begin, body, turns
from tests.router.ledger import World, card
from tests.router.managed import managed, spec

TO_ZERO = Scale(least=0, most=2, idle=30)


async def test_a_newcomer_whose_contexts_are_shorter_is_not_gone_on_at() -> None:
    """A request that was let in waits for one that keeps what it was promised."""
    async with managed(1, scale=TO_ZERO) as played:
        router, [first] = played.fleets.router, played.fleets.engines
        first.gate.clear()
        running = await begin(ask_well(router, body(40, tokens=9)))
        await played.orders.stop("a", 0.0)
        first.gate.set()
        await turns()
        played.processes.starts.set()
        played.fleets.world.engine("z", card(context_length=16)).down = True
        await played.orders.add(spec("z"))
        assert played.states() == {"a": "away", "z": "up"}
        assert not running.done()
        await played.orders.add(spec("y"))
        await running
        assert played.fleets.journal[-1].unit == "y"


async def test_newcomers_answer_who_waits_already() -> None:
    """They were no candidates when the request came."""
    async with managed(1) as played:
        router = played.fleets.router
        await played.orders.stop("a")
        waiting = await begin(ask_well(router, body()))
        adding = await begin(played.orders.add(spec("z")))
        assert played.states() == {"a": "away", "z": "starting"}
        assert played.state("z").models == ("m",)  # it has told of none yet
        played.processes.starts.set()
        await adding
        await waiting
        with pytest.raises(Conflict, match="z is up; a unit that is away can be removed"):
            await played.orders.remove("z")
        await played.orders.stop("z")
        await played.orders.remove("a")
        await played.orders.remove("z")
        with pytest.raises(UnknownModel):
            await ask(router, body())


async def test_a_newcomer_is_asked_where_all_others_refuse() -> None:
    """It came while one of them had yet to answer."""
    async with managed(1, scale=TO_ZERO) as played:
        router, [first] = played.fleets.router, played.fleets.engines
        played.processes.starts.set()
        first.refusal = QueueFull("the queue is full")
        first.refusing.clear()
        asking = await begin(ask_well(router, body()))
        await played.orders.add(spec("z"))
        first.refusing.set()
        await asking
        assert [call.unit for call in played.fleets.journal if call.verb == "start_generate"] == [*"az"]


async def test_a_newcomer_that_speaks_another_way_stays_out() -> None:
    async with managed(1, scale=TO_ZERO) as played:
        played.fleets.world.engine("z", card(vocab_size=5)).down = True
        played.controller.edit(Edit(units={"z": UnitEdit(engine=spec("z"))}))
        played.processes.starts.set()
        await turns()
        assert played.states() == {"a": "up", "z": "down"}


async def test_a_unit_is_added_and_removed() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        await played.orders.add(spec("z"))
        assert played.states() == {"a": "up", "z": "up"}
        placement = played.orders.placement
        assert [one.unit for one in placement.units] == ["a", "z"]
        assert (placement.away, placement.scaled, placement.cores) == ((), (), 4)
        with pytest.raises(Conflict, match="another name"):
            await played.orders.add(spec("z"))
        with pytest.raises(Conflict, match="away can be removed"):
            await played.orders.remove("a")
        await played.orders.stop("a")
        await ask_well(played.fleets.router, body())
        assert [one.unit for one in played.orders.placement.away] == ["a"]
        await played.orders.remove("a")
        assert played.states() == {"z": "up"}
        assert played.done == ["start z", "stop a", "forget a"]


async def test_who_comes_later_learns_what_has_changed_since() -> None:
    """A unit that lost its process meanwhile, and one that got one."""
    async with managed(3, scale=TO_ZERO) as played:
        played.processes.starts.set()
        await played.orders.stop("b")
        snapshot = played.controller.snapshot
        await played.orders.stop("a")
        await played.orders.start("b")
        async with played.another_gateway(snapshot) as (router, _):
            assert router.services == {"a": "away", "b": "up", "c": "up"}
            await ask_well(router, body())


async def test_one_that_dies_or_speaks_another_way_is_not_added() -> None:
    async with managed(1, scale=TO_ZERO) as played:
        played.processes.starts.set()
        played.processes.problem = "ended with exit code 3"
        with pytest.raises(Unavailable, match="exit code 3"):
            await played.orders.add(spec("z"))
        played.processes.problem = ""
        played.fleets.world.engine("y", card(vocab_size=5)).down = True
        with pytest.raises(Conflict, match="m differs in vocab_size"):
            await played.orders.add(spec("y"))
        assert played.done == ["start z", "forget z", "start y", "stop y", "forget y"]
        for name in ("../z", "", "z/z", "z" * 65, "gateway", "scheduler"):
            with pytest.raises(BadRequest, match="is no name"):
                await played.orders.add(spec(name))
        with pytest.raises(Conflict, match="comes and goes by itself"):
            await played.orders.remove("a")
        assert played.states() == {"a": "up"}


Said = list[ModelCard] | Unavailable


class TwiceAsked:
    """Satisfies `EngineClient` as far as it is asked: each answer of `models` is given by the test."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[list[ModelCard]]] = []

    async def models(self) -> list[ModelCard]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    def say(self, question: int, said: Said) -> None:
        if isinstance(said, Unavailable):
            self.asked[question].set_exception(said)
        else:
            self.asked[question].set_result(said)


BROKEN = Unavailable("the connection broke")


@pytest.mark.parametrize(
    ("first", "second"),
    [([card("old"), card("new")], [card("new")]), (BROKEN, [card("new")]), ([card("old")], BROKEN)],
    ids=["answers after an answer", "fails after an answer", "answers after a failure"],
)
async def test_what_comes_of_an_earlier_question_late_does_not_count(first: Said, second: Said) -> None:
    """An earlier process was asked, and is replaced by one with other models, which is heard of first."""
    client = TwiceAsked()
    unit = Unit(
        "a",
        cast(EngineClient, client),
        ManualClock(),
        index=PrefixIndex(),
        admit=lambda _, cards: cards,
        lost=lambda _: None,
        changed=lambda _: None,
    )
    asking = [asyncio.create_task(unit.ask()), asyncio.create_task(unit.ask())]
    await turns()
    for question, said in ((1, second), (0, first)):
        client.say(question, said)
        await asking[question]
    assert list(unit.replicas) == ([] if second is BROKEN else ["new"])
    assert unit.up == (second is not BROKEN)


class CountedTokens(dict[str, str]):
    """Counts how often such tokens are compared."""

    compared = 0

    def __ne__(self, other: object) -> bool:
        CountedTokens.compared += 1
        return dict.__ne__(self, other)


async def test_a_newcomer_is_compared_with_one_replica_of_each_model() -> None:
    world = World()
    for number in range(20):
        world.engine(f"unit-{number}", card(special_tokens=CountedTokens()))
    CountedTokens.compared = 0
    async with Router(world.engines, load_program("data_parallel"), ManualClock()) as router:
        assert set(router.services.values()) == {"up"}
    assert CountedTokens.compared == 19


async def test_a_unit_that_answers_at_the_second_question_has_no_problem_any_more() -> None:
    async with managed(1) as played:
        [engine] = played.fleets.engines
        played.processes.die("a")
        await turns()
        played.processes.starts.set()
        played.processes.deaf.add("a")
        await played.fleets.clock.advance(0.5)
        await turns()
        assert played.controller.status.processes["a"].problem == "the engine cannot be reached"
        engine.down = False
        await played.fleets.clock.advance(10)
        await turns()
        assert played.states() == {"a": "up"}
        assert played.controller.status.processes["a"].problem == ""
