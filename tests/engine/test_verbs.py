"""The verbs between modelled engines: whatever moves, the tokens stay, and every block comes back."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, PromptTooLong, UnknownModel
from kvloom.types.verbs import PrepRecv
from tests.modelled import ask, expected, turns
from tests.modelled_units import MODEL, generate, move, prompt, run, sending, units


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 33, 70])
@pytest.mark.parametrize("warm", [0, 1, 4, 6, 8, 69])
def test_one_prefills_and_one_decodes(length: int, warm: int) -> None:
    """Disaggregation, with each side having the first `warm` tokens cached or not."""

    async def test() -> None:
        async with units(2, seed=length) as (p, d):
            tokens = prompt(length)
            if warm:
                await ask(p.engine, generate(tokens[:warm], request="w"))
                await ask(d.engine, generate(tokens[: warm // 2 + 1], request="w"))
            before = d.computed
            spot, sent = await move(p, d, tokens, -1)
            assert d.computed == before  # the receiver does nothing for it
            answer = await ask(d.engine, generate(tokens, begin=-1))
            assert answer.tokens == expected(d.executor, generate(tokens))
            assert d.computed - before <= 6  # the last token of the prompt, and the output but its last
            if sent is not None:
                assert sent.cached + sent.computed == spot.end - spot.matched
                whole = warm if warm >= length - 1 else warm - warm % 4  # pages, where anything is computed
                assert sent.computed <= max(1, length - whole)

    run(test)


@pytest.mark.parametrize("begin", [1, 4, 5, 11, 19])
def test_balanced(begin: int) -> None:
    """The receiver computes the prompt from `begin` on."""

    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(20)
            await move(p, d, tokens, begin)
            answer = await ask(d.engine, generate(tokens, begin=begin))
            assert answer.tokens == expected(d.executor, generate(tokens))
            assert d.computed == 20 - begin + 5

    run(test)


def test_n_choices_logprobs_and_preemption_after_a_move() -> None:
    async def test() -> None:
        async with units(2, blocks=64) as (p, d):
            tokens = prompt(21)
            await move(p, d, tokens, -1)
            body = structs.replace(generate(tokens, begin=-1, temperature=1.0, max_tokens=30), n=3)
            answer = await ask(d.engine, body)
            assert answer.tokens == expected(d.executor, body)

    run(test)


def test_prompt_logprobs_are_computed_where_they_are_asked() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(13)
            await move(p, d, tokens, -1)
            body = generate(tokens, begin=-1, prompt_logprobs=0)
            answer = await ask(d.engine, body)
            assert answer.tokens == expected(d.executor, body)
            assert answer.prompt is not None
            assert len(answer.prompt) == 12

    run(test)


def test_a_context_moves_and_moves_on() -> None:
    """Migration of a context that was generated: its pages go straight, computed nowhere again. It stays
    when nobody generates from it at once."""

    async def test() -> None:
        async with units(3) as (a, b, c):
            tokens = prompt(18)
            answer = await ask(a.engine, generate(tokens, max_tokens=15))
            context = tokens + answer.tokens[0][:-1]
            for source, target in ((a, b), (b, c)):
                before = source.computed
                _, sent = await move(source, target, context, None)
                assert sent is not None
                assert sent.computed == 0
                assert source.computed == before
                await target.pass_time(100)
                assert target.engine.pool.available == target.engine.pool.total
            more = [*context, *prompt(5, first=9)]
            before = c.computed
            final = await ask(c.engine, generate(more, request="more"))
            assert final.tokens == expected(c.executor, generate(more))
            assert final.ends[0].cached_tokens == len(context)
            assert c.computed == before + 5 + 5

    run(test)


def test_asked_twice_answers_the_same() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(14)
            ask_for = PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1)
            spot = await d.engine.prep_recv(ask_for)
            assert await d.engine.prep_recv(ask_for) == spot
            send = sending(tokens, spot, 0, -1)
            both = await asyncio.gather(p.engine.remote_send(send), p.engine.remote_send(send))
            assert both[0] == both[1] == await p.engine.remote_send(send)
            assert p.computed == 13
            assert (await ask(d.engine, generate(tokens, begin=-1))).tokens == expected(
                d.executor, generate(tokens)
            )

    run(test)


def test_every_wrong_order_is_a_clear_error() -> None:
    async def test() -> None:
        async with units(3) as (p, d, other):
            tokens = prompt(14)
            with pytest.raises(BadRequest, match="nothing is reserved"):
                await ask(d.engine, generate(tokens, begin=-1))
            with pytest.raises(BadRequest, match="nothing is reserved"):
                await d.engine.renew("r")
            with pytest.raises(UnknownModel):
                await d.engine.prep_recv(PrepRecv(model="none", request="r", prompt=tokens))
            with pytest.raises(PromptTooLong):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=prompt(97)))
            with pytest.raises(BadRequest, match="outside a prompt of 14"):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=-15))
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=12))
            with pytest.raises(BadRequest, match="another reservation"):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=11))
            with pytest.raises(BadRequest, match="past the 0 tokens received"):
                await ask(d.engine, generate(tokens, begin=1))
            send = sending(tokens, spot, 0, 12)
            with pytest.raises(BadRequest, match="not within the address"):
                await p.engine.remote_send(structs.replace(send, end=13))
            with pytest.raises(BadRequest, match="it is wide's"):
                await p.engine.remote_send(structs.replace(send, model="tall"))
            with pytest.raises(BadRequest, match="claimed up to 0"):
                await p.engine.remote_send(structs.replace(send, begin=4))
            await p.engine.remote_send(send)
            with pytest.raises(BadRequest, match="claimed up to 12"):
                await other.engine.remote_send(send)
            with pytest.raises(BadRequest, match="past the 12 tokens"):
                await ask(d.engine, generate(tokens, begin=13))
            with pytest.raises(BadRequest, match="another prompt"):
                await ask(d.engine, generate([5, *tokens[1:]], begin=3))
            answer = await ask(d.engine, generate(tokens, begin=12))
            assert answer.tokens == expected(d.executor, generate(tokens))
            with pytest.raises(BadRequest, match="is over"):
                await p.engine.remote_send(structs.replace(send, request="again"))

    run(test)


def test_unlike_forms_are_refused_at_once() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            cards = {card.name: card for card in await d.engine.models()}
            form = cards[MODEL].form
            assert form is not None
            for change in ({"head_dim": 16}, {"dtype": "float16"}, {"tokens_per_block": 8}, {"layers": 3}):
                unlike = structs.replace(form, **change)
                with pytest.raises(BadRequest, match=f"has {next(iter(change))}"):
                    await d.engine.prep_recv(
                        PrepRecv(model=MODEL, request="r", prompt=prompt(9), sender=unlike)
                    )
            await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=prompt(9), sender=form))

    run(test)


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=prompt(30)))
            held = d.engine.pool.total - d.engine.pool.available
            assert held == 8 * 4
            await d.pass_time(spot.lease - 1)
            assert (await d.engine.renew("r")).lease == spot.lease
            await d.pass_time(spot.lease - 1)
            assert d.engine.pool.total - d.engine.pool.available == held
            await d.pass_time(2)
            assert d.engine.pool.free == d.engine.pool.total
            with pytest.raises(BadRequest, match="ran out"):
                await d.engine.renew("r")

    run(test)


@pytest.mark.parametrize("by_abort", [True, False])
def test_blocks_come_back_only_when_no_sender_writes(by_abort: bool) -> None:
    """The request is aborted, or its lease runs out, at every moment of a send, while others want blocks."""

    async def test(cut: int) -> str:
        async with units(2, seed=cut) as (p, d):
            tokens = prompt(40)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens))
            send = asyncio.create_task(p.engine.remote_send(sending(tokens, spot)))
            await turns(cut)
            await (d.engine.abort("r") if by_abort else d.pass_time(spot.lease + 1))
            bodies = [generate(prompt(30, first=i), request=f"o{i}", max_tokens=20) for i in range(4)]
            others = [asyncio.create_task(ask(d.engine, body)) for body in bodies]
            (error,) = await asyncio.gather(send, return_exceptions=True)
            await d.settled()
            for body, other in zip(bodies, others, strict=True):
                assert (await other).tokens == expected(d.executor, body)
            return str(error) if isinstance(error, KvloomError) else "it had arrived"

    ends: list[str] = []

    async def tests() -> None:
        ends.extend([await test(cut) for cut in range(0, 120, 5)])

    run(tests)
    assert set(ends) == {"address: the reservation at unit-1 is over", "it had arrived"}


def test_abort_at_the_sender_ends_the_send() -> None:
    async def test(cut: int) -> bool:
        async with units(2, seed=cut) as (p, d):
            tokens = prompt(40)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens))
            send = asyncio.create_task(p.engine.remote_send(sending(tokens, spot)))
            await turns(cut)
            await p.engine.abort("r")
            (error,) = await asyncio.gather(send, return_exceptions=True)
            await d.engine.abort("r")
            await d.settled()
            return isinstance(error, KvloomError)

    ends: list[bool] = []

    async def tests() -> None:
        ends.extend([await test(cut) for cut in range(0, 120, 5)])

    run(tests)
    assert set(ends) == {True, False}


def test_a_receiver_that_dies_and_arenas_that_are_full() -> None:
    async def test() -> None:
        async with units(2, blocks=40) as (p, d):
            tokens = prompt(30)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens))
            with pytest.raises(OutOfBlocks):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="s", prompt=prompt(30, first=1)))
            send = sending(tokens, spot)
            task = asyncio.create_task(p.engine.remote_send(send))
            await turns(12)
            d.transport.plane.kill(d.transport)
            with pytest.raises(KvloomError, match="unit-1"):
                await task
            with pytest.raises(KvloomError, match="cannot be reached"):
                await p.engine.remote_send(structs.replace(send, request="again"))
            await d.engine.abort("r")
            await d.settled()

    run(test)
