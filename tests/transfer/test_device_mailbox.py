"""A mailbox in a device's memory: the host's layout, exported and mapped like an arena, with the
host's memory in the device's place."""

from __future__ import annotations

import mmap
import os

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvloom.kernels.mailbox import MASK, NOTE, End
from kvloom.kernels.mailbox_reference import collect, post, serve
from kvloom.kv.arena import Arena, create_memfd
from kvloom.offload.memory.device import BorrowerDeviceMailbox, DevicePlace, LenderDeviceMailbox, tensors_of
from kvloom.offload.memory.mailbox import START, MailboxForm, OffloadMailbox, size_of
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from tests.kernels.loaned import WIDTH, Loaned, Shape
from tests.transfer.device_memory import HostMemory

FORM = MailboxForm(slots=2, rows=3, width=4, pages=6, layers=2, heads=4, kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


def test_it_is_laid_out_as_the_hosts() -> None:
    """What one writes by the names of the one, the other reads by its own."""
    fd = create_memfd("mailbox")
    os.posix_fallocate(fd, 0, size_of(FORM))
    host = OffloadMailbox(fd, FORM)
    memory = torch.frombuffer(mmap.mmap(fd, size_of(FORM)), dtype=torch.uint8)
    device = tensors_of(memory, FORM, "float32")
    for i, name in enumerate(("posted", "done", "asleep", "waiting", "left", "over")):
        getattr(host, name).set(MASK - i)
        assert int(device.word(name)) == -1 - i
    for name in ("lengths", "tables", "map", "qkv", "out"):
        array, tensor = getattr(host, name), getattr(device, name)
        assert array.shape == tensor.shape
        array.flat[:] = np.arange(array.size)
        assert (tensor.numpy() == array).all()
    host.head[0] = (7, 2, 1)
    assert device.head[0].tolist() == [7, 2, 1]
    host.notes[1] = np.array((7, 1, 2, -3, 0.25, 30.0, 5), NOTE)
    assert device.places[1].tolist() == [7, 1, 2, -3]
    assert device.scoring[1].tolist() == [0.25, 30.0]
    os.close(fd)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_task_between_two_mappings(dtype: str) -> None:
    """Of the memory that was exported; counters begin short of where they wrap."""
    loan = Loaned(Shape(dtype=dtype), start=START)  # type: ignore[arg-type]
    assert int(loan.mailbox.word("posted")) & MASK == START
    assert loan.mailbox.qkv.dtype == loan.mailbox.out.dtype == getattr(torch, dtype)
    theirs = loan.borrowed.tensors
    loan.begin([3, 5])
    q, k, v = loan.rows(2)
    post(theirs, loan.borrower_state, q, k, v, 1, 0.5)
    serve(loan.mailbox, loan.lender_state, loan.lent)
    out = torch.empty_like(q)
    collect(theirs, loan.borrower_state, out, 0)
    close = 2e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(out.double(), loan.wanted(1, q, k, v, 0.5), rtol=close, atol=close)


def test_more_rows_or_pages_than_it_takes_are_refused_at_once() -> None:
    loan = Loaned(Shape())
    lengths, tables = np.ones(4, np.int32), np.zeros((4, 1), np.int32)
    page_map, versions = np.zeros((6, 2, 2), np.int32), np.ones(6, np.int64)
    with pytest.raises(BadRequest, match="4 rows of 1 pages; want 3 of 3"):
        loan.borrowed.describe(lengths, tables, page_map, versions, 0)
    with pytest.raises(BadRequest, match=f"1 rows of {WIDTH + 1} pages"):
        loan.borrowed.describe(lengths[:1], np.zeros((1, WIDTH + 1), np.int32), page_map, versions, 0)


def _place(arena: Arena, form: MailboxForm) -> DevicePlace:
    memory = HostMemory(arena)
    return DevicePlace(os.getpid(), memory.export(arena.bytes), form, "float32")


def test_a_place_that_is_none_is_refused() -> None:
    arena = Arena(1, -(-size_of(FORM) // 64) * 64)
    memory, place = HostMemory(arena), _place(arena, FORM)
    assert BorrowerDeviceMailbox(msgspec.msgpack.encode(place), "lender", memory).form == FORM
    with pytest.raises(BadRequest, match="that of lender cannot be read"):
        BorrowerDeviceMailbox(b"nothing", "lender", memory)
    for change in ({"slots": 3}, {"slots": 0}, {"rows": 400}, {"dtype": "bfloat16"}):
        odd = replace(place, **change) if "dtype" in change else replace(place, form=replace(FORM, **change))
        with pytest.raises(BadRequest, match="mailbox: that of lender"):
            BorrowerDeviceMailbox(msgspec.msgpack.encode(odd), "lender", memory)
    gone = replace(place, handle=msgspec.msgpack.encode((os.getpid(), 1 << 20, size_of(FORM))))
    with pytest.raises(Unavailable):
        BorrowerDeviceMailbox(msgspec.msgpack.encode(gone), "lender", memory)


def test_slots_that_would_not_wrap_are_refused() -> None:
    with pytest.raises(ConfigError, match="a mailbox of 6 slots; want a power of two"):
        LenderDeviceMailbox(replace(FORM, slots=6), "float32", CPU)


def test_a_borrower_may_leave() -> None:
    loan = Loaned(Shape())
    loan.begin([3])
    q, k, v = loan.rows(1)
    post(loan.mailbox, loan.borrower_state, q, k, v, 0, 1.0)
    loan.borrowed.close()
    serve(loan.mailbox, loan.lender_state, loan.lent)
    assert int(loan.mailbox.word("left")) == End.CLOSED
    assert (
        int(loan.mailbox.word("done"))
        == int(loan.lender_state.claim) >> 32
        != int(loan.mailbox.word("posted"))
    )
