"""A sender that is given another address, endpoint or prompt than its receiver reserved for writes
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import structs

from kvloom.transfer.nixl_agent import NixlEndpoint
from kvloom.types.address import Endpoint, KVAddress
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32
from tests.transfer.context import Context
from tests.transfer.units import Unit
from tests.transfer.wire import BLOCK_BYTES, BLOCKS

BEGIN, END = 5, 100  # the last page has room for more


def _beside(context: Context) -> Context:
    """Another live reservation of as many blocks, none of them shared."""
    blocks = context.address.block_map
    free = np.setdiff1d(np.arange(BLOCKS, dtype=np.int32), blocks)[: blocks.size]
    return context.reserve(_to(context.address, free.reshape(blocks.shape)))


def _to(address: KVAddress, blocks: I32) -> KVAddress:
    return structs.replace(address, blocks=KVAddress.compress(blocks))


def _forgeries(honest: Context, other: Context) -> Iterator[tuple[str, Context]]:
    address, blocks, prompt = honest.address, honest.address.block_map, honest.prompt
    changed = blocks.copy()
    changed[0, 0, 0] = other.address.block_map[0, 0, 0]
    for name, forged in {
        "one block is another's": _to(address, changed),
        "another order": _to(address, blocks[:, ::-1].copy()),
        "the same block twice": _to(address, np.full_like(blocks, blocks[0, 0, 0])),
        "another reservation's blocks": structs.replace(address, blocks=other.address.blocks),
        "another reservation's ticket": structs.replace(address, ticket=other.ticket),
        "begins before": structs.replace(address, begin=BEGIN - 5),
        "ends later": structs.replace(address, end=END + 20),
        "ends earlier": structs.replace(address, end=END - 1),
        "another model": structs.replace(address, model="n"),
    }.items():
        yield name, replace(honest, address=forged)
    for name, text in {
        "another first token": [prompt[0] + 1, *prompt[1:]],
        "another last token": [*prompt[: END - 1], 0, *prompt[END:]],
        "a shorter prompt": prompt[: END - 1],
        "no prompt": [],
    }.items():
        yield name, replace(honest, prompt=text)


def test_what_the_receiver_did_not_reserve_for_is_refused_before_a_byte(pair: tuple[Unit, Unit]) -> None:
    honest = Context.make(*pair, BEGIN, END, seed=20)
    other = _beside(honest)
    for name, forged in _forgeries(honest, other):
        with pytest.raises(BadRequest, match="address: the reservation at receiver is for other blocks"):
            forged.send(BEGIN, min(END, forged.address.end))
        assert (honest.received(), other.received()) == (BEGIN, BEGIN), name
        honest.check_untouched()
    replace(honest, prompt=[*honest.prompt[:END], 7]).send(BEGIN, END)  # what comes after it is nothing to it
    honest.check(BEGIN, END)
    assert honest.receiver.call("close", ticket=other.ticket)
    honest.receiver.close_soon(honest.ticket)


def test_a_begin_before_the_address_takes_nothing_from_others(pair: tuple[Unit, Unit]) -> None:
    """Tokens that the receiver has are never sent again, whatever the address says."""
    honest = Context.make(*pair, BEGIN, END, seed=21)
    forged = replace(honest, address=structs.replace(honest.address, begin=0))
    with pytest.raises(BadRequest, match="address: the reservation"):
        forged.send(0, END)
    honest.check_untouched()
    honest.receiver.close_soon(honest.ticket)


def _elsewhere(endpoint: Endpoint) -> Iterator[tuple[str, Endpoint]]:
    """Endpoints that lead to the same unit as this one, but do not say the same. Over NIXL an arena is
    said to begin at a number; in shared memory it is a whole memfd, and begins where that does."""
    fields = msgspec.msgpack.decode(endpoint.where)
    yield "more than there is to say", _saying(endpoint, [*fields, 0])
    if endpoint.kind == "nixl":
        where = msgspec.convert(fields, NixlEndpoint)
        for name, blocks in {"before": -1, "behind": 1, "far behind": BLOCKS // 2}.items():
            shifted = structs.replace(where, address=where.address + blocks * BLOCK_BYTES)
            yield f"an arena that begins {name}", _saying(endpoint, shifted)
        yield "a larger arena", _saying(endpoint, structs.replace(where, blocks=where.blocks + 1))


def _saying(endpoint: Endpoint, where: object) -> Endpoint:
    return structs.replace(endpoint, where=msgspec.msgpack.encode(where))


def test_an_endpoint_that_is_not_the_receivers_is_refused_before_a_byte(pair: tuple[Unit, Unit]) -> None:
    """The blocks are the address' own, but counted from elsewhere they would be others'."""
    honest = Context.make(*pair, BEGIN, END, seed=22)
    for name, peer in _elsewhere(honest.peer):
        with pytest.raises(BadRequest, match=r"address: the reservation at receiver is for .* or endpoint;"):
            replace(honest, peer=peer).send(BEGIN, END)
        assert honest.received() == BEGIN, name
        honest.check_untouched()
    honest.send(BEGIN, END)
    honest.check(BEGIN, END)
    honest.receiver.close_soon(honest.ticket)
