"""Pages that sends keep while copies read them: whoever waits for those goes on, or a send is given up."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import Action, Preempt, UnitView
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.verbs import PrepRecv, RemoteSend, Sent
from tests.modelled import ask, expected, turns
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units

PARTLY = 48  # blocks of as many tokens; `wide` has 4 of each a page


def preempting(monkeypatch: pytest.MonkeyPatch, at: list[int]) -> None:
    """Whatever is partly computed goes back once the model uses the next of `at` blocks."""
    usual = POLICIES["adbs"]

    def policy(view: UnitView) -> Action | None:
        begun = [model for model in view.models if model.name == MODEL and model.partial]
        if at and begun and begun[0].used >= at[0]:
            at.pop(0)
            return Preempt(MODEL)
        return usual(view)

    monkeypatch.setitem(POLICIES, "adbs", policy)


async def ordered(receiver: Unit, length: int, request: str, priority: int = 0) -> RemoteSend:
    tokens = prompt(length, first=ord(request))
    spot = await receiver.engine.prep_recv(PrepRecv(model=MODEL, request=request, prompt=tokens))
    return structs.replace(sending(tokens, spot, request=request), priority=priority)


def test_of_sends_that_wait_for_each_others_pages_the_last_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = [PARTLY, 2 * PARTLY]
    preempting(monkeypatch, thresholds)

    async def test() -> None:
        async with units(3, blocks=100) as (p, d, e):
            later, first = await ordered(d, 80, "a", priority=5), await ordered(e, 80, "b")
            giving = asyncio.create_task(p.engine.remote_send(later))
            while len(thresholds) == 2:
                await turns(1)
            assert isinstance(await p.engine.remote_send(first), Sent)
            with pytest.raises(Unavailable, match="gave its blocks to others"):
                await giving
            body = generate(prompt(80, first=ord("b")), begin=80 - 1, request="b")
            assert (await ask(e.engine, body)).tokens == expected(e.executor, body)

    run(test)


def test_a_send_that_was_put_back_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is room beside the pages that it keeps."""
    preempting(monkeypatch, [16, 32])

    async def test() -> None:
        async with units(2, blocks=100) as (p, d):
            assert (await p.engine.remote_send(await ordered(d, 50, "a"))).computed == 50
            assert p.computed == 50
            assert (await p.engine.load()).models[MODEL].preemptions_total == 2

    run(test)


def test_who_waits_for_a_sends_pages_goes_on_when_it_has_arrived() -> None:
    async def test() -> None:
        async with units(2, blocks=100) as (p, d):
            order = await ordered(d, 90, "a")
            await ask(p.engine, generate(order.prompt, request="warm", max_tokens=1))
            body = generate(prompt(90), request="waits", max_tokens=2)
            sending_it = asyncio.create_task(p.engine.remote_send(order))
            await turns(1)
            assert (await ask(p.engine, body)).tokens == expected(p.executor, body)
            assert (await sending_it).cached == 90

    run(test)


def test_a_send_as_long_as_the_pool_that_begins_within_a_cached_page() -> None:
    """Had it sent a part of that page and then copied it, page and copy together would be one too many."""

    async def test() -> None:
        async with units(2, blocks=96) as (p, d):
            order = await ordered(d, 96, "a")
            await ask(p.engine, generate(order.prompt[:6], request="warm", max_tokens=1))
            sent = asyncio.create_task(p.engine.remote_send(order))
            await turns(2000)
            assert sent.done()
            assert (await sent) == Sent(cached=4, computed=92)

    run(test)


def test_two_sends_of_one_request_at_once() -> None:
    """To two receivers: each has an answer of its own, and an abort ends both."""

    async def test() -> None:
        async with units(3) as (p, *receivers):
            tokens = prompt(40)
            ask_for = PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1)
            spots = [await d.engine.prep_recv(ask_for) for d in receivers]
            sends = [sending(tokens, spot, 0, -1) for spot in spots]
            answers = await asyncio.gather(*(p.engine.remote_send(send) for send in [*sends, *sends]))
            assert answers[:2] == answers[2:]
            assert all(sent.cached + sent.computed == 39 for sent in answers)
            own = generate(prompt(30, first=3))  # and the request may generate here as well
            assert (await ask(p.engine, own)).tokens == expected(p.executor, own)
            for d in receivers:
                answer = await ask(d.engine, generate(tokens, begin=-1))
                assert answer.tokens == expected(d.executor, generate(tokens))

    run(test)


@pytest.mark.parametrize("cut", [2, 10, 20])
def test_an_abort_ends_all_sends_of_a_request(cut: int) -> None:
    async def test() -> None:
        async with units(3, seed=cut) as (p, *receivers):
            tokens = prompt(60)
            ask_for = PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1)
            spots = [await d.engine.prep_recv(ask_for) for d in receivers]
            sends = [asyncio.create_task(p.engine.remote_send(sending(tokens, s, 0, -1))) for s in spots]
            await turns(cut)
            await p.engine.abort("r", 0)  # a choice has no sends
            await turns(1)
            await p.engine.abort("r")
            before = len(p.executor.jobs)
            errors = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(error, KvloomError) for error in errors)
            assert len(p.executor.jobs) == before  # not computed to its end for nobody
            for d in receivers:
                await d.engine.abort("r")

    run(test)
