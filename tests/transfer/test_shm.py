"""What only shared memory can promise: at once, and leaving nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvloom.kv.arena import memfd_link
from kvloom.transfer.fenced import Memory
from kvloom.transfer.ledger import ROW_BYTES
from kvloom.transfer.shared_memory import ShmEndpoint
from kvloom.types.errors import Unavailable
from tests.transfer.context import Context
from tests.transfer.units import DEADLINE, Unit, units


@pytest.fixture
def pair() -> Iterator[tuple[Unit, Unit]]:
    with units("shm", "sender", "receiver") as (sender, receiver):
        yield sender, receiver


def test_what_a_failed_thread_has_claimed_can_be_claimed_by_others(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=7)
    sender, receiver = pair
    first, second = context.claim(0, 40), context.claim(40, 70)
    sender.call("put_junk", number=first)
    for transfer in (second, first):
        with pytest.raises(Unavailable, match="KV plane of this unit has failed"):
            sender.call("arrived", number=transfer)
    other = replace(context, sender=receiver)
    receiver.call("abandon", number=other.claim(0, 100))
    receiver.close_soon(context.ticket)


def test_a_dead_peer_is_let_go_of(pair: tuple[Unit, Unit]) -> None:
    """Its process' end alone does it, as do `forget` and another endpoint: no mapping, no descriptor."""
    sender, receiver = pair
    nothing = _held(sender)
    Context.make(sender, receiver, 0, 100, seed=3).send(0, 100)
    assert _held(sender) > nothing
    sender.call("forget", unit="receiver")
    _wait_until_held(sender, nothing)
    Context.make(sender, receiver, 0, 100, seed=4).send(0, 100)
    assert _held(sender) > nothing
    receiver.kill()
    _wait_until_held(sender, nothing)


def test_a_loop_of_reservations_and_sends_holds_no_more(pair: tuple[Unit, Unit]) -> None:
    sender, receiver = pair
    held: list[tuple[int, int]] = []
    for seed in range(8):
        context = Context.make(sender, receiver, 0, 40, seed=seed)
        context.send(0, 40)
        receiver.close_soon(context.ticket)
        held.append((_held(sender), _held(receiver)))
    _wait_until_held(sender, held[0][0])
    _wait_until_held(receiver, held[0][1])


def test_only_what_a_process_has_made_for_its_endpoint_is_mapped(pair: tuple[Unit, Unit]) -> None:
    sender, receiver = pair
    context = Context.make(sender, receiver, 0, 100, seed=6)
    context.send(0, 50)
    held, where = _held(sender), msgspec.msgpack.decode(receiver.endpoint.where, type=ShmEndpoint)
    for name, forged in _elsewhere(sender, where):
        endpoint = structs.replace(receiver.endpoint, unit=name, where=msgspec.msgpack.encode(forged))
        with pytest.raises(Unavailable, match=f"{name} is gone: descriptor"):
            sender.claim(endpoint, context.address, 0, 50, 100)
    sender.call("drop")
    context.send(50, 100)
    context.check(0, 100)
    _wait_until_held(sender, held)


def _elsewhere(sender: Unit, where: ShmEndpoint) -> Iterator[tuple[str, ShmEndpoint]]:
    """Endpoints that fit in size, inode and all, but lead to something else."""
    arena, ledger = where.arena, where.ledger
    slots, blocks = arena.size // ROW_BYTES, ledger.size // 64
    swapped = {"arena": ledger, "ledger": arena, "blocks": blocks, "block_bytes": 64, "slots": slots}
    yield "swapped", structs.replace(where, **swapped)
    yield "ledger-as-both", structs.replace(where, arena=ledger, blocks=blocks, block_bytes=64)
    there = Path(f"/proc/{sender.process.pid}/fd")
    links = {os.readlink(link): int(link.name) for link in there.iterdir()}
    maps = {
        name: structs.replace(getattr(where, name), fd=links[memfd_link(name, where.pid)])
        for name in ("arena", "ledger")
    }
    yield "who-maps-it", structs.replace(where, pid=sender.process.pid, **maps)
    for name in ("kvloom-arena", f"kvloom-arena-{os.getpid()}0", "kvloom-"):
        fd = os.memfd_create(name)
        os.truncate(fd, arena.size)
        yield f"named-{name}", structs.replace(where, pid=os.getpid(), arena=Memory.of(fd))
        os.close(fd)


def _held(unit: Unit) -> int:
    """Descriptors of the process, and its mappings of the KV plane's memory."""
    process = Path(f"/proc/{unit.process.pid}")
    maps = (process / "maps").read_text().count("/memfd:kvloom-")
    return len(list((process / "fd").iterdir())) + maps


def _wait_until_held(unit: Unit, held: int) -> None:
    """Its threads may take a moment to let go."""
    end = time.monotonic() + DEADLINE
    while _held(unit) != held:
        unit.call("drop")
        assert time.monotonic() < end, f"{_held(unit)} held, not {held}"
