"""What a borrower writes that keeps to no rules: refused, or confined to what is lent."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.kernels.mailbox import HEAD, NOTE
from kvloom.kv.arena import memfd_link
from kvloom.offload.memory.lender import Lending, Task
from kvloom.offload.memory.mailbox import OffloadMailbox
from kvloom.types.errors import BadRequest
from tests.transfer.loans import (
    GEOMETRY,
    HEADS,
    LENT,
    PAGES,
    ROWS,
    WIDTH,
    Lender,
    asked,
    begin,
    borrowed,
    lender_here,
    memory_of,
)


def _post(made: Lender) -> None:
    """A task that keeps to the rules: two rows of three and ten tokens."""
    loan = borrowed(made.lending.loan)
    begin(loan, [3, 10])
    qkv = np.zeros((2, HEADS + 2 * GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)
    loan.tasks.post(1, qkv, 1.0, 0, 0.0)


def _set(name: str, value: int, *at: int) -> Callable[[OffloadMailbox], None]:
    def change(memory: OffloadMailbox) -> None:
        getattr(memory, name)[at] = value

    return change


def _field(name: str, field: str, value: int) -> Callable[[OffloadMailbox], None]:
    def change(memory: OffloadMailbox) -> None:
        getattr(memory, name)[field][0] = value

    return change


FORGERIES: dict[str, Callable[[OffloadMailbox], None]] = {
    "a length of nothing": _set("lengths", 0, 0),
    "a negative length": _set("lengths", -(2**31), 1),
    "a length past its pages": _set("lengths", WIDTH * 8 + 1, 0),
    "a page unheard of": _set("tables", PAGES - 1, 1, 0),
    "a page that is none": _set("tables", PAGES, 0, 0),
    "a negative page": _set("tables", -1, 1, 1),
    "a block beyond the loan": _set("map", PAGES * 4, 2, 1, 0),
    "a negative block": _set("map", -1, 0, 0, 0),
    "a change of a page that is none": _set("changed", PAGES, 0),
    "a negative change": _set("changed", -7, 1),
    "more changes than pages": _field("head", "changed", PAGES + 1),
    "fewer changes than none": _field("head", "changed", -1),
    "more rows than there is room for": _field("head", "rows", ROWS + 1),
    "no rows": _field("head", "rows", 0),
    "a descriptor of another iteration": _field("head", "iteration", 9),
    "a task of another iteration": _field("notes", "iteration", 9),
    "a task over other rows": _field("notes", "rows", 1),
    "a layer that is none": _field("notes", "layer", GEOMETRY.layers),
    "a negative layer": _field("notes", "layer", -1),
    "more tasks than slots": lambda memory: memory.posted.set(1000),
    "tasks taken back": lambda memory: memory.posted.set(-1),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_is_refused(name: str) -> None:
    with lender_here() as made:
        _post(made)
        FORGERIES[name](memory_of(made))
        with pytest.raises(BadRequest, match="weave"):
            made.lending.receiver.next()


def _confined(task: Task) -> None:
    """All that a task makes the kernel touch is lent."""
    descriptor = task.descriptor
    assert 0 <= task.layer < GEOMETRY.layers
    assert task.window >= 0
    assert len(descriptor.lengths) == len(descriptor.tables) <= ROWS
    for length, row, page, offset in zip(
        descriptor.lengths, descriptor.tables, descriptor.slot_page, descriptor.slot_offset, strict=True
    ):
        used = GEOMETRY.pages(int(length))
        assert 1 <= used <= WIDTH
        assert set(descriptor.map[row[:used]].ravel().tolist()) <= set(LENT.tolist())
        assert page == row[used - 1]
        assert offset == (length - 1) % GEOMETRY.tokens_per_block


_BYTES = st.integers(0, 255)


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_at_random_are_refused_or_confined(data: st.DataObject) -> None:
    with lender_here() as made:
        _post(made)
        memory = memory_of(made)
        for name in data.draw(
            st.lists(st.sampled_from(["head", "lengths", "tables", "changed", "map", "notes"]))
        ):
            flat = getattr(memory, name).reshape(-1).view(np.uint8)
            at = data.draw(st.integers(0, flat.size - 1))
            flat[at] = data.draw(st.one_of(st.integers(0, 8), _BYTES))
        try:
            task = made.lending.receiver.next()
        except BadRequest:
            return
        assert task is not None
        _confined(task)


def test_what_came_back_in_two_parts_is_out_of_reach() -> None:
    """A number that was handed back first names no block that was handed back later."""
    with lender_here() as made:
        _post(made)
        for part in ([0, 1], [2, 3]):
            made.lending.receiver.forget(np.array(part))
        task = made.lending.receiver.next()
        assert task is not None
        assert set(task.descriptor.map[:4].ravel().tolist()) <= set(LENT[4:].tolist())


def test_a_mailbox_far_larger_than_what_is_lent_is_refused() -> None:
    with lender_here() as made:
        greedy = replace(asked(os.getpid()), rows=1 << 20, width=1 << 10)
        with pytest.raises(BadRequest, match=r"1048576 rows of 1024 pages .* bytes for 6 pages"):
            Lending(greedy, LENT, made.transport)


@pytest.mark.parametrize("what", ["mailbox", "ledger", "arena"])
def test_no_peer_changes_the_size_of_what_it_maps(what: str) -> None:
    """Else it could end the lender, which reads and writes it."""
    with lender_here() as made:
        links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files()}
        [own] = [fd for fd, name in links.items() if name == memfd_link(what, os.getpid())][-1:]
        size = os.fstat(own).st_size
        for other in (0, size - 1, size + 1):
            fd = os.open(f"/proc/self/fd/{own}", os.O_RDWR)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
            os.close(fd)
        assert made.lending.receiver.next() is None


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_what_was_checked_cannot_be_changed_any_more() -> None:
    with lender_here() as made:
        _post(made)
        memory = memory_of(made)
        task = made.lending.receiver.next()
        for name in ("lengths", "tables", "map"):
            getattr(memory, name)[:] = 1 << 30
        memory.head[0] = np.zeros(1, HEAD)[0]
        memory.notes[0] = np.zeros(1, NOTE)[0]
        assert task is not None
        _confined(task)
