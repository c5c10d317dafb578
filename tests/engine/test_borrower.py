"""Who keeps a unit in a loan asks again and again, but not for what will never be, and says a thing once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

from kvloom.engine.freeness import freeness
from kvloom.offload.loan_manager import LoanManager
from kvloom.offload.terms import Borrow, HandBack, Loan
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.spec import WeaveSpec
from tests.cluster.loads import model, unit
from tests.engine.modelled_weaving import MODEL, PAGE, ModelledBackend, hot_unit, loan_of
from tests.modelled import modelled, turns


class Refusing:
    """A lender, and a clock that counts how often its caller has waited."""

    def __init__(self, why: Callable[[int], KvloomError], blocks: int = 4000) -> None:
        self.asked = 0
        self.waited = 0
        self._why = why
        self._blocks = blocks

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.waited += 1
        await asyncio.sleep(0)

    async def load(self) -> UnitLoad:
        return unit(model(), blocks=self._blocks)

    async def lend(self, body: Borrow) -> Loan:
        self.asked += 1
        raise self._why(self.asked)

    async def take_back(self, body: HandBack) -> None:
        raise AssertionError("nothing is lent")


def played(refusing: Refusing) -> bool:
    """Whether the borrower has given up, within thirty turns."""
    engine, executor = hot_unit(24, 24)

    async def play() -> bool:
        async with modelled(engine, executor):
            spec = WeaveSpec("unit-1", 0.5, 0.3)
            lenders = {"unit-1": refusing}
            manager = LoanManager(engine.borrower, MODEL, spec, lenders, refusing, freeness)
            task = asyncio.create_task(manager.run())
            while not task.done() and refusing.waited < 30:
                await turns(1)
            given_up = task.done()
            task.cancel()
            return given_up

    return asyncio.run(play())


def test_a_model_that_cannot_be_woven_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heads(self: ModelledBackend, model: str) -> int:
        raise BadRequest("weave: its layers differ")

    monkeypatch.setattr(ModelledBackend, "heads", heads)
    refusing = Refusing(lambda _: Unavailable("never asked"))
    with caplog.at_level(logging.WARNING):
        assert played(refusing)
    assert (refusing.asked, refusing.waited) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "unit-1 does not lend to wide: weave: its layers differ"
    ]


def test_a_lender_that_could_never_is_asked_once() -> None:
    refusing = Refusing(lambda _: BadRequest("weave: this unit's device cannot"))
    assert played(refusing)
    assert refusing.asked == 1


def test_a_part_that_holds_no_page_is_asked_for_never() -> None:
    refusing = Refusing(lambda _: Unavailable("never asked"), blocks=10)
    assert played(refusing)
    assert refusing.asked == 0


def test_what_differs_in_a_number_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked again all the same, and another reason is told."""

    def why(asked: int) -> KvloomError:
        return OutOfBlocks(f"ask again in {20 - asked} s") if asked < 20 else Unavailable("it is gone")

    refusing = Refusing(why)
    with caplog.at_level(logging.WARNING):
        assert not played(refusing)
    assert refusing.asked == 30
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "ask again in 19 s",
        "it is gone",
    ]


class Lending(Refusing):
    """A lender that lends, though its first answer may be lost."""

    def __init__(self, blocks: int, *, lost: bool = False) -> None:
        super().__init__(lambda _: Unavailable("the engine cannot be reached any more"), blocks)
        self.lent: Borrow | None = None
        self._lost = lost

    async def load(self) -> UnitLoad:
        lent = self.lent.pages * PAGE if self.lent else 0
        return structs.replace(await super().load(), lent_blocks=lent)

    async def lend(self, body: Borrow) -> Loan:
        assert self.lent in (None, body), "another loan at the same time"
        self.lent = body
        if self._lost and not self.asked:
            await super().lend(body)
        self.asked += 1
        return loan_of(body, np.arange(body.pages * PAGE, dtype=np.int32))


@pytest.mark.parametrize("lost", [True, False])
def test_who_may_have_lent_is_asked_again_before_others(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is lost, or the loan cannot be opened at first. It is the freest only before it lends."""
    failing, real = [not lost], ModelledBackend.borrow

    def opened(self: ModelledBackend, borrow: Borrow, loan: Loan) -> int:
        if failing[0]:
            failing[0] = False
            raise Unavailable("the lender cannot be seen")
        return real(self, borrow, loan)

    monkeypatch.setattr(ModelledBackend, "borrow", opened)
    engine, executor = hot_unit(24, 24)
    first, other = Lending(40, lost=lost), Lending(36)

    async def play() -> None:
        async with modelled(engine, executor):
            lenders = {"unit-1": first, "unit-2": other}
            spec = WeaveSpec("unit-1", 0.5, 0.3, others=("unit-2",))
            keeper = LoanManager(engine.borrower, MODEL, spec, lenders, first, freeness)
            task = asyncio.create_task(keeper.run())
            while engine.borrower.loan(MODEL) is None:
                await turns(1)
            task.cancel()

    asyncio.run(play())
    assert (first.asked, other.asked) == (2, 0)
