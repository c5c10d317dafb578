"""The CPU's part in weaving: puts mailboxes, attenders and executor together."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvloom.core.transfer import Transport
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.model.weaving.attender import Attender
from kvloom.model.weaving.terms import on_this_loop, one_number, watched
from kvloom.transport.lender import Lending
from kvloom.transport.loan import BorrowedBlocks
from kvloom.types.errors import Conflict
from kvloom.types.geometry import I32
from kvloom.types.load import Waits
from kvloom.types.offload import Borrow, Loan

_log = logging.getLogger(__name__)
_PATIENCE = 10.0  # seconds for a layer's attention: then the sequences away are computed again at home


class TorchWeaver:
    """Implements Weaver: one loan to another unit, and one to each own model."""

    def __init__(self, executor: TorchExecutor, transport: Transport, patience: float = _PATIENCE) -> None:
        self._executor = executor
        self._transport = transport
        self._patience = patience
        self._lending: Lending | None = None

    def heads(self, model: str) -> int:
        return one_number(model, self._executor.heads(model))

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        borrowed = BorrowedBlocks(borrow, loan, self._patience)
        self._executor.loans[borrow.model] = borrowed
        return borrowed.blocks

    def give_back(self, model: str) -> None:
        self._executor.loans.pop(model).tasks.close()

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self._lending is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        lending = Lending(borrow, blocks, self._transport)
        with watched(borrow):
            try:
                attender = Attender(lending, self._executor.arena, borrow, on_this_loop(ended))
            except OSError:
                lending.close()
                raise
        self._executor.attender = attender
        self._lending = lending
        return lending.loan

    def waits(self) -> Waits | None:
        attender = self._executor.attender
        return None if attender is None else attender.waits()

    def recall(self) -> bool:
        attender, self._executor.attender = self._executor.attender, None
        if attender is not None:
            attender.close()
        if self._lending is not None and not self._lending.close():
            return False
        self._lending = None
        return True
