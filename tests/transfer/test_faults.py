"""Units that are stalled, stopped, killed or restarted, that fail or do not close, whatever the transport."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from tests.processes import DEADLINE
from tests.transfer.context import Context
from tests.transfer.kinds import DEVICE, NIXL
from tests.transfer.units import Unit, units

FAILED = r"the KV plane of this unit has failed \(TypeError\(.*restart the unit"
PROGRAM = """
import asyncio, struct, sys
import numpy as np
from kvloom.types.address import KVAddress, KVForm
from kvloom.types.transfer import BlockCopies
from kvloom.kv.arena import Arena
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.tcp import TcpTransport
from kvloom.transfer.nixl_agent import HostPlace
from tests.transfer.device_memory import HostMemory, LikeAGpu

FORM = KVForm(layers=1, kv_heads=1, head_dim=16, dtype="float32", block_bytes=4096, tokens_per_block=32)
BLOCKS = struct.pack("<ii", 7, 1)

async def used(kind):
    device = lambda unit, arena: CudaIpcTransport(unit, arena, HostMemory(arena))
    nixl = lambda unit, arena: NixlTransport(unit, arena, HostPlace())
    like_a_gpu = lambda unit, arena: NixlTransport(unit, arena, LikeAGpu())
    tcp = lambda unit, arena: TcpTransport(unit, arena, "secret")
    kinds = {"shm": ShmTransport, "tcp": tcp, "nixl": nixl, "device": device, "nixl-device": like_a_gpu}
    sender, receiver = (kinds[kind](end, Arena(64, 4096)) for end in ("sender", "receiver"))
    address = KVAddress(
        model="m", form=FORM, begin=0, end=32, blocks=BLOCKS, ticket=receiver.open(0, 5, BLOCKS)
    )
    transfer = sender.claim(receiver.endpoint, address, 5, 0, 32)
    one, none, all_ = (np.array([n], np.int32) for n in (7, 0, 32))
    transfer.put(BlockCopies(one, one, none, all_))
    await transfer.arrived()
    print(receiver.received(address.ticket), flush=True)
    return sender, receiver, transfer

async def main():
    return [await used(kind) for kind in sys.argv[1:]]

kept = asyncio.run(main())
"""


def test_after_close_says_true_a_stalled_sender_writes_nothing(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=13)
    sender, receiver = pair
    transfer = context.stall("before", skip=1)
    assert sender.call("state", number=transfer) == "copying"
    receiver.close_soon(context.ticket)
    receiver.call("fill", seed=99)  # the blocks are used for something else
    after = receiver.arena.copy()
    sender.call("ungate")
    with pytest.raises((BadRequest, Unavailable), match="receiver"):
        sender.call("arrived", number=transfer)
    np.testing.assert_array_equal(receiver.arena, after)


@pytest.mark.parametrize("kind", ["shm", DEVICE])
def test_close_waits_for_a_piece_and_no_longer_and_a_killed_sender_holds_nothing(kind: str) -> None:
    """Pieces are of four blocks here; the third is under way when the reservation is closed."""
    with units(kind, "sender", "receiver") as (sender, receiver):
        context = Context.make(sender, receiver, 0, 100, seed=1)
        transfer = context.stall("inside", skip=2)
        for _ in range(2):
            assert not receiver.call("close", ticket=context.ticket)
        sender.call("ungate")
        with pytest.raises(BadRequest, match="over"):
            sender.call("arrived", number=transfer)
        assert receiver.call("close", ticket=context.ticket)
        written = {i for i in range(len(receiver.arena)) if (receiver.arena[i] != context.before[i]).any()}
        assert written == set(context.whole(0, 100).peer[:12].tolist())
        again = Context.make(sender, receiver, 0, 100, seed=2)
        again.stall("inside", skip=1)
        assert not receiver.call("close", ticket=again.ticket)
        sender.kill()
        assert receiver.call("close", ticket=again.ticket)


def test_transfers_that_have_not_arrived_fail_at_the_end(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=14)
    first, second = context.claim(0, 50), context.claim(50, 100)
    early = context.sender.start("arrived", number=second)
    context.sender.call("close_all")
    with pytest.raises(Unavailable, match="stopping"):
        context.sender.result(early)
    context.sender.result(context.put(first, context.whole(0, 50)))
    with pytest.raises(Unavailable, match="stopping"):
        context.sender.call("arrived", number=first)
    context.receiver.close_soon(context.ticket)
    context.check_untouched()


def test_a_receiver_that_dies_makes_the_send_fail(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=15)
    sender, receiver = mortal
    transfer = context.stall("before", skip=2)
    receiver.kill()
    sender.call("ungate")
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=transfer)
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=context.claim(0, 100))


def test_a_sender_that_dies_half_way_leaves_a_reservation_that_closes(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=16)
    sender, receiver = mortal
    context.stall("inside", skip=2)
    sender.kill()
    assert context.received() == 0
    receiver.close_soon(context.ticket)
    assert receiver.call("close", ticket=receiver.open(0))


def test_a_restarted_receiver_is_another_peer(mortal: tuple[Unit, Unit]) -> None:
    sender, receiver = mortal
    context = Context.make(sender, receiver, 0, 100, seed=17)
    context.send(0, 50)
    with units(receiver.endpoint.kind, "receiver") as (restarted,):
        receiver.kill()
        with pytest.raises(KvloomError, match="receiver"):
            context.send(50, 100)
        again = Context.make(sender, restarted, 0, 100, seed=18)
        again.send(0, 100)
        again.check(0, 100)


def test_all_that_has_not_arrived_fails_and_nothing_more_is_sent(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=30)
    sender, receiver = mortal
    context.send(0, 30)
    broken, waiting, silent = context.claim(30, 50), context.claim(50, 70), context.claim(70, 90)
    early = sender.start("arrived", number=waiting)  # it waits for what goes before
    sender.call("put_junk", number=broken)
    with pytest.raises(Unavailable, match=FAILED):
        sender.result(early)
    sender.result(context.put(silent, context.whole(70, 90)))
    for transfer in (silent, broken):
        with pytest.raises(Unavailable, match=FAILED):
            sender.call("arrived", number=transfer)
        sender.call("abandon", number=transfer)
    with pytest.raises(Unavailable, match=FAILED):
        context.claim(90, 100)
    assert context.received() == 30
    context.check(0, 30)
    receiver.close_soon(context.ticket)
    sender.call("close_all")
    with pytest.raises(Unavailable, match=FAILED):
        context.claim(90, 100)


def test_where_the_thread_is_needed_for_receiving_no_reservation_is_opened(
    mortal: tuple[Unit, Unit],
) -> None:
    """A ledger needs none; over NIXL nobody would answer the senders. What is open can be closed."""
    context = Context.make(*mortal, 0, 100, seed=32)
    sender, _ = mortal
    back = sender.open(0, context.address.digest(context.prompt, sender.endpoint))
    transfer = context.claim(0, 100)
    sender.call("put_junk", number=transfer)
    with pytest.raises(Unavailable, match=FAILED):
        sender.call("arrived", number=transfer)
    if sender.endpoint.kind != "nixl":
        assert sender.call("close", ticket=sender.open(0))
    else:
        with pytest.raises(Unavailable, match=FAILED):
            sender.open(0)
    assert sender.call("received", ticket=back) == 0
    assert sender.call("close", ticket=back)
    context.receiver.close_soon(context.ticket)


def test_a_process_ends_with_its_transports_open() -> None:
    """One of each kind, each with two units in one process, which CUDA cannot have: a process does not map
    its own exports."""
    kinds = ["shm", "tcp", "device", *(["nixl", "nixl-device"] if NIXL else [])]
    command = [sys.executable, "-c", PROGRAM, *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (0, "32\n" * len(kinds)), done.stderr
