"""The CPU's part in lending and borrowing: puts mailboxes, attention servers and forwards together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvloom.kv.arena import Arena
from kvloom.offload.cpu.attention import CpuLoans
from kvloom.offload.cpu.attention_server import AttentionServer
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.memory.lender import Lending
from kvloom.offload.terms import Borrow, Loan, on_this_loop, one_number, watched
from kvloom.types.errors import Conflict
from kvloom.types.geometry import I32
from kvloom.types.load import Waits
from kvloom.types.transfer import Transport

_PATIENCE = 10.0  # seconds for a layer's attention: then offloaded sequences are computed again at home


class CpuExecutor(Protocol):
    """The part of the executor that lending and borrowing need."""

    arena: Arena
    loans: CpuLoans

    def heads(self, model: str) -> int:
        """Returns the heads of q in all layers; 0 if they differ."""


class CpuOffloadBackend:
    """Satisfies `OffloadBackend`: one loan to another unit, and one to each own model."""

    def __init__(self, executor: CpuExecutor, transport: Transport, patience: float = _PATIENCE) -> None:
        self._executor = executor
        self._transport = transport
        self._patience = patience
        self._lending: Lending | None = None

    def heads(self, model: str) -> int:
        return one_number(model, self._executor.heads(model))

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        borrowed = BorrowedBlocks(borrow, loan, self._patience)
        self._executor.loans.borrowed[borrow.model] = borrowed
        return borrowed.blocks

    def give_back(self, model: str) -> None:
        self._executor.loans.borrowed.pop(model).tasks.close()

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self._lending is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        lending = Lending(borrow, blocks, self._transport)
        with watched(borrow):
            try:
                server = AttentionServer(lending, self._executor.arena, borrow, on_this_loop(ended))
            except OSError:
                lending.close()
                raise
        self._executor.loans.server = server
        self._lending = lending
        return lending.loan

    def waits(self) -> Waits | None:
        server = self._executor.loans.server
        return None if server is None else server.waits()

    def recall(self) -> bool:
        server, self._executor.loans.server = self._executor.loans.server, None
        if server is not None:
            server.close()
        if self._lending is not None and not self._lending.close():
            return False
        self._lending = None
        return True
