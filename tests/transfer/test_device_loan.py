"""A loan between two devices: what is copied there and back, and what ends it; on the host in their place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvloom.kernels.mailbox import End, Trouble
from kvloom.kv.arena import Arena
from kvloom.offload.memory.device import BorrowedDeviceBlocks, DeviceLending
from kvloom.offload.terms import Borrow, Loan
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32
from kvloom.types.job import PageMove
from tests.transfer.device_memory import SharedMemory
from tests.transfer.loans import BLOCKS, FORM, GEOMETRY, LENT, PAGES, asked

TOKENS = GEOMETRY.tokens_per_block


class Units:
    """A lender and a borrower, each with an arena of its own, in this process."""

    def __init__(self) -> None:
        self.arenas = [Arena(BLOCKS, GEOMETRY.block_bytes) for _ in range(2)]
        self.transports = [
            CudaIpcTransport(name, arena, SharedMemory(), slots=8)
            for name, arena in zip(("lender", "borrower"), self.arenas, strict=True)
        ]

    def lend(self, borrow: Borrow) -> DeviceLending:
        return DeviceLending(borrow, LENT, self.transports[0], self.arenas[0].bytes)

    def borrowed(self, loan: Loan, borrow: Borrow | None = None) -> BorrowedDeviceBlocks:
        return BorrowedDeviceBlocks(borrow or asked(os.getpid()), loan, self.transports[1])


@contextmanager
def open_units() -> Iterator[Units]:
    made = Units()
    try:
        yield made
    finally:
        for transport in made.transports:
            transport.close_all()


def _pages(blocks: I32) -> I32:
    return blocks.reshape(PAGES, GEOMETRY.layers, GEOMETRY.kv_heads)


def test_pages_go_there_and_back() -> None:
    home = _pages(np.arange(len(LENT), dtype=np.int32))
    away = _pages(np.arange(len(LENT), dtype=np.int32)[::-1].copy())
    pages = np.array([0, 1], np.int32)
    with open_units() as units:
        loan = units.borrowed(units.lend(asked(os.getpid())).loan)
        there, here = (one.bytes for one in units.arenas)
        here[:] = torch.randint(256, here.shape, dtype=torch.uint8)
        before, untouched = here.clone(), there.clone()
        loan.move(here, home, away, PageMove(pages, pages + 2, np.array([TOKENS, 3], np.int32), out=True))
        others = np.setdiff1d(np.arange(BLOCKS), LENT)
        cut = there.view(BLOCKS, -1)
        assert (cut[others] == untouched.view(BLOCKS, -1)[others]).all()
        assert (cut != untouched.view(BLOCKS, -1)).any(1).sum() == 2 * GEOMETRY.blocks_per_page
        here.zero_()
        loan.move(here, home, away, PageMove(pages, pages + 2, np.array([TOKENS, 3], np.int32), out=False))
        view = [one.view(BLOCKS, 2, TOKENS, -1) for one in (here, before)]
        first, second = home[0].ravel(), home[1].ravel()
        assert (view[0][first] == view[1][first]).all()
        assert (view[0][second][:, :, :3] == view[1][second][:, :, :3]).all()
        assert not view[0][second][:, :, 3:].any()


def test_nothing_is_copied_once_the_loan_is_over() -> None:
    pages, tokens = np.array([0], np.int32), np.array([TOKENS], np.int32)
    home = _pages(np.arange(len(LENT), dtype=np.int32))
    with open_units() as units:
        lending = units.lend(asked(os.getpid()))
        loan = units.borrowed(lending.loan)
        assert lending.close()
        before = units.arenas[0].bytes.clone()
        for out in (True, False):
            with pytest.raises(BadRequest, match="is over"):
                loan.move(units.arenas[1].bytes, home, home, PageMove(pages, pages, tokens, out=out))
        assert (units.arenas[0].bytes == before).all()


def test_a_mailbox_is_kept_until_its_borrower_has_left_or_is_dead() -> None:
    """Else what it writes late would go into what has become something else."""
    with open_units() as units:
        lending = units.lend(asked(os.getpid()))
        loan = units.borrowed(lending.loan)
        assert int(lending.mailbox.tensors.word("waiting"))
        assert lending.close()
        assert not lending.unused
        loan.close()
        assert lending.unused
        process = subprocess.Popen(["sleep", "60"])
        other = units.lend(asked(process.pid))
        assert not other.unused
        process.kill()
        process.wait()
        assert other.unused


@pytest.mark.parametrize(
    "change",
    [
        *({"heads": 8}, {"rows": 2}, {"width": 5}, {"model": "m", "form": replace(FORM, layers=1)}),
        {"form": replace(FORM, dtype="bfloat16")},
    ],
)
def test_a_loan_that_was_not_asked_for_is_given_back(change: dict[str, Any]) -> None:
    with open_units() as units:
        lending = units.lend(asked(os.getpid()))
        with pytest.raises(BadRequest):
            units.borrowed(lending.loan, replace(asked(os.getpid()), **change))
        assert lending.unused


def test_what_makes_no_sense_is_not_lent() -> None:
    with open_units() as units:
        with pytest.raises(BadRequest, match="3 heads over 2; want a multiple"):
            units.lend(replace(asked(os.getpid()), heads=3))
        with pytest.raises(BadRequest, match="int8; want bfloat16, float16, float32"):
            units.lend(replace(asked(os.getpid()), form=replace(FORM, dtype="int8")))
        with pytest.raises(BadRequest, match="make a mailbox of"):
            units.lend(replace(asked(os.getpid()), rows=1 << 20))


def test_a_status_in_words() -> None:
    with open_units() as units:
        loan = units.borrowed(units.lend(asked(os.getpid())).loan)
        assert loan.why(0) is None
        assert loan.why(End.CLOSED) == "lender wants its blocks back"
        assert loan.why(Trouble.GONE) == "lender is gone"
        assert loan.why(77) == "lender ended the loan with 77"
