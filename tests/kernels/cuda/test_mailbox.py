"""The kernels that work a mailbox, in Triton's interpreter: against their twins, and against attention as it
should be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom.kernels import mailbox_reference
from kvloom.kernels.cuda import offload_ask as ask
from kvloom.kernels.cuda import offload_serve as serve
from kvloom.kernels.mailbox import MASK, PARTS, End, Trouble, signed
from tests.kernels.loaned import CLOSE, LAYERS, PAGES, WIDTH, WRAPS, Loaned, Shape, same, scale_of

SHAPES = {
    "plain": Shape(),
    "one query a head, one head": Shape(kv_heads=1, group=1, rows=1),
    "many queries, odd size": Shape(kv_heads=1, group=5, head_dim=24),
    "half precision": Shape(dtype="float16"),
    "a page a tile": Shape(tokens=20, rows=2),
}


def both(shape: Shape, **how: Any) -> tuple[Loaned, Loaned]:
    """Two loans in the same state."""
    return Loaned(shape, **how), Loaned(shape, **how)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 2.0)])
def test_a_task_like_its_twin_and_like_attention(name: str, window: int, softcap: float) -> None:
    shape = SHAPES[name]
    loan, twin = both(shape, seed=len(name))
    lengths = [1, 2 * shape.tokens, shape.tokens + 1][: shape.rows]
    form = scale_of(shape), window, softcap
    for one in (loan, twin):
        one.begin(lengths, first=1)
    q, k, v = loan.rows(len(lengths) + 2)
    ask.post(loan.mailbox, loan.borrower_state, q, k, v, 1, *form, programs=2)
    mailbox_reference.post(twin.mailbox, twin.borrower_state, q, k, v, 1, *form)
    same(loan, twin)
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=2)
    mailbox_reference.serve(twin.mailbox, twin.lender_state, twin.lent, programs=2)
    same(loan, twin)
    out, other = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    ask.collect(loan.mailbox, loan.borrower_state, out, 0, programs=2)
    mailbox_reference.collect(twin.mailbox, twin.borrower_state, other, 0)
    same(loan, twin)
    close = CLOSE[shape.dtype]
    torch.testing.assert_close(out, other, rtol=close, atol=close, equal_nan=True)
    wanted = loan.wanted(1, q, k, v, *form)
    torch.testing.assert_close(out[1:-1].double(), wanted, rtol=close, atol=close)
    assert out[[0, -1]].isnan().all()
    assert not int(loan.borrower_state.status)


@pytest.mark.parametrize(
    "name", ["plain", "one query a head, one head", "half precision", "many queries, odd size"]
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (6, 2.0)])
def test_long_rows_are_cut(name: str, window: int, softcap: float) -> None:
    """Rows of one run, of some, and of as many as there are; the second launch finds nothing left."""
    shape = replace(SHAPES[name], tokens=16)
    loan, twin = both(shape, span=5)
    lengths = [16, 5, 32][: shape.rows]
    form = scale_of(shape), window, softcap
    for one in (loan, twin):
        one.begin(lengths)
    q, k, v = loan.rows(len(lengths))
    for one in (loan, twin):
        mailbox_reference.post(one.mailbox, one.borrower_state, q, k, v, 0, *form)
    parts = PARTS // (len(lengths) * shape.kv_heads)
    cut = -(-max(lengths if not window else [window]) // 5)
    assert min(parts, cut) > 1
    for programs in (3, 2):
        serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=programs)
        mailbox_reference.serve(twin.mailbox, twin.lender_state, twin.lent, programs=programs)
        same(loan, twin)
    out = torch.empty_like(q)
    ask.collect(loan.mailbox, loan.borrower_state, out, 0, programs=2)
    assert not int(loan.borrower_state.status)
    assert not loan.lender_state.counts.any()
    close = CLOSE[shape.dtype]
    torch.testing.assert_close(out.double(), loan.wanted(0, q, k, v, *form), rtol=close, atol=close)


def test_a_page_that_is_not_lent_in_any_run_ends_the_loan() -> None:
    for page in range(2):
        loan, twin = both(Shape(tokens=16, rows=1), span=5)
        for one in (loan, twin):
            one.begin([32])
            mailbox_reference.post(one.mailbox, one.borrower_state, *one.rows(1), 1, 1.0)
            one.mailbox.tables[0, page] = PAGES
        serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=2)
        mailbox_reference.serve(twin.mailbox, twin.lender_state, twin.lent, programs=2)
        for one in (loan, twin):
            assert int(one.mailbox.word("over")) == int(one.lender_state.over) == End.FORGED
            assert int(one.mailbox.word("done")) == signed(WRAPS)


def test_nothing_posted_is_nothing_done() -> None:
    loan, before = both(Shape())
    for one in (loan, before):
        one.begin([2, 3])
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=3)
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, looks=4, programs=2)
    same(loan, before)


def _set(name: str, value: int, *at: int) -> Callable[[Loaned], object]:
    def change(loan: Loaned) -> None:
        getattr(loan.mailbox, name)[at] = value

    return change


def _used(name: str, value: int) -> Callable[[Loaned], object]:
    """In the map, the entry of the first page of the second row; in the tables, that page."""

    def change(loan: Loaned) -> None:
        if name == "map":
            loan.mailbox.map[int(loan.mailbox.tables[1, 0]), 1, 0] = value
        else:
            loan.mailbox.tables[1, 0] = value

    return change


_COUNT = PAGES * LAYERS * 2
FORGERIES: dict[str, Callable[[Loaned], object]] = {
    "no tokens": _set("lengths", 0, 0),
    "fewer tokens than none": _set("lengths", -(2**31), 1),
    "more tokens than pages": _set("lengths", WIDTH * 4 + 1, 0),
    "a page that is none": _used("tables", PAGES),
    "a page far out": _used("tables", 2**31 - 1),
    "a negative page": _used("tables", -1),
    "a block beyond the loan": _used("map", _COUNT),
    "a block far out": _used("map", 2**31 - 1),
    "a negative block": _used("map", -(2**31)),
    "a descriptor of another iteration": _set("head", 9, 0, 0),
    "a descriptor of other rows": _set("head", 1, 0, 1),
    "a task of another iteration": _set("notes", -5, 0, 0),
    "a layer that is none": _set("notes", LAYERS, 0, 1),
    "a negative layer": _set("notes", -1, 0, 1),
    "no rows": lambda loan: (_set("notes", 0, 0, 2)(loan), _set("head", 0, 0, 1)(loan))[0],
    "more rows than fit": lambda loan: (_set("notes", 4, 0, 2)(loan), _set("head", 4, 0, 1)(loan))[0],
    "more tasks than slots": lambda loan: loan.mailbox.word("posted").add_(3),
    "tasks taken back": lambda loan: loan.mailbox.word("posted").sub_(2),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_cannot_be_ends_the_loan_and_touches_nothing_else(name: str) -> None:
    loan, twin = both(Shape())
    start = signed(WRAPS)
    for one in (loan, twin):
        one.begin([3, 6])
        q, k, v = one.rows(2)
        mailbox_reference.post(one.mailbox, one.borrower_state, q, k, v, 1, 1.0)
        FORGERIES[name](one)
    others = torch.ones(len(loan.lent.arena), dtype=torch.bool)
    others[loan.lent.blocks.long()] = False
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=2)
    mailbox_reference.serve(twin.mailbox, twin.lender_state, twin.lent, programs=2)
    same(loan, twin)
    assert loan.lent.arena[others].isnan().all()
    assert int(loan.mailbox.word("over")) == int(loan.lender_state.over) == End.FORGED
    assert int(loan.mailbox.word("done")) == int(loan.lender_state.claim) >> 32 == start
    FORGERIES["more tasks than slots"](loan)
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=2)  # none is taken any more
    assert int(loan.mailbox.word("done")) == start
    ask.collect(loan.mailbox, loan.borrower_state, q, 5, programs=2)
    assert int(loan.borrower_state.status) == End.FORGED
    assert not q.any()


def posted(shape: Shape = Shape()) -> tuple[Loaned, torch.Tensor]:  # noqa: B008 - frozen
    loan = Loaned(shape)
    loan.begin([3, 6])
    q, k, v = loan.rows(2)
    ask.post(loan.mailbox, loan.borrower_state, q, k, v, 0, 1.0, programs=2)
    return loan, torch.full_like(q, torch.nan)


def test_a_lender_that_does_not_answer_is_late_and_no_row_is_left_over() -> None:
    loan, out = posted()
    ask.collect(loan.mailbox, loan.borrower_state, out, 3, programs=2)
    assert int(loan.borrower_state.status) == Trouble.LATE
    assert not out.any()
    before = loan.box.memory.clone()
    ask.post(loan.mailbox, loan.borrower_state, *loan.rows(2), 0, 1.0, programs=2)
    assert torch.equal(before, loan.box.memory)  # it is of no more use


def test_a_lender_that_counts_wrongly_is_not_believed() -> None:
    loan, out = posted()
    loan.mailbox.word("done").add_(2)
    ask.collect(loan.mailbox, loan.borrower_state, out, 3, programs=2)
    assert int(loan.borrower_state.status) == Trouble.WRONG
    assert not out.any()


def beside() -> AbstractContextManager[object]:
    """What is asked for in it does not wait for what a GPU is at."""
    if not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def test_an_answer_that_comes_while_it_is_waited_for() -> None:
    loan, out = posted()

    def answer() -> None:
        with beside():
            loan.mailbox.out.fill_(5)
            loan.mailbox.word("done").add_(1)

    answer()  # has loaded what it needs: a device that is waited on may wait with that too
    loan.mailbox.word("done").sub_(1)
    loan.mailbox.out.zero_()
    timer = threading.Timer(0.05, answer)
    timer.start()
    ask.collect(loan.mailbox, loan.borrower_state, out, 1_000_000, programs=2)
    timer.join()
    assert not int(loan.borrower_state.status)
    assert (out == 5).all()


def test_no_more_tasks_than_slots() -> None:
    loan, _ = posted()
    ask.post(loan.mailbox, loan.borrower_state, *loan.rows(2), 1, 1.0, programs=2)
    assert not int(loan.borrower_state.status)
    before = loan.box.memory.clone()
    ask.post(loan.mailbox, loan.borrower_state, *loan.rows(2), 0, 1.0, programs=2)
    assert int(loan.borrower_state.status) == Trouble.FULL
    assert torch.equal(before, loan.box.memory)


@pytest.mark.parametrize("word", ["left", "over"])
def test_who_has_left_gets_nothing_done(word: str) -> None:
    """Nor does who lends, once it has ended the loan."""
    loan, _ = posted()
    (loan.mailbox.word("left") if word == "left" else loan.lender_state.over).fill_(End.CLOSED)
    before = loan.box.memory.clone()
    serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=2)
    assert torch.equal(before, loan.box.memory)


def test_parts_that_other_launches_have_taken_are_left_to_them() -> None:
    """Two of four, on another stream: the task is done when they are."""
    loan, _ = posted()
    loan.lender_state.claim.add_(2)
    for _ in range(2):
        serve.serve(loan.mailbox, loan.lender_state, loan.lent, programs=4)
        assert int(loan.lender_state.claim) & MASK == 4
        assert int(loan.lender_state.finished) == 2
    assert int(loan.mailbox.word("done")) == signed(WRAPS)
    assert not loan.mailbox.out[0, 0].any()


def test_what_does_not_fit_is_refused() -> None:
    loan = Loaned(Shape())
    _, k, v = loan.rows(2)
    with pytest.raises(ValueError, match="q: want"):
        ask.post(loan.mailbox, loan.borrower_state, k, k, v, 0, 1.0)
    with pytest.raises(ValueError, match="out: want"):
        ask.collect(loan.mailbox, loan.borrower_state, k, 1)
    other = Loaned(Shape(head_dim=24))
    with pytest.raises(ValueError, match="arena: want"):
        serve.serve(loan.mailbox, loan.lender_state, other.lent)
