"""The protocol of a mailbox on devices, step by step: whichever of its programs, launches and ends goes on,
each task is done once, in order, and attention is as it should be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kernels.mailbox import MASK
from kvloom.kernels.mailbox_reference import Steps, collect_steps, post_steps, serve_steps
from tests.kernels.loaned import LAYERS, WRAPS, Loaned, Shape, scale_of

_SHAPE = Shape(kv_heads=2, group=1, head_dim=4, tokens=2, rows=2)
_PATIENCE = 1 << 20


class Ends:
    """A borrower that decodes, and a lender whose lanes poll again and again; each launch has programs that
    go on by themselves, and the next launch of a lane begins when all have ended."""

    def __init__(self, start: int, lanes: int, programs: int, steps: int, ahead: int, looks: int) -> None:
        """ahead: tasks that are posted before one is collected. looks: of a poll. Rows are cut token by
        token."""
        self.loan = Loaned(_SHAPE, start, span=1)
        self.programs = programs
        self.steps = steps
        self.ahead = ahead
        self.looks = looks
        self.served: list[int] = []
        self.actors: dict[str, list[Steps]] = {f"lane {i}": [] for i in range(lanes)}
        self.asks = self._asks()
        self.actors["borrower"] = next(self.asks)
        self.over = False

    def _asks(self) -> Iterator[list[Steps]]:
        loan = self.loan
        for step in range(self.steps):
            loan.begin([step + 1, 3])
            asked, wanted = loan.rows(2), []
            for layer in range(LAYERS):
                yield self._launch(post_steps, *asked, layer, scale_of(_SHAPE), 0, 0.0)
                wanted.append(loan.wanted(layer, *asked, scale_of(_SHAPE)))
                if len(wanted) == self.ahead:
                    yield from self._collected(wanted.pop(0))
            for one in wanted:
                yield from self._collected(one)

    def _collected(self, wanted: torch.Tensor) -> Iterator[list[Steps]]:
        out = torch.full(wanted.shape, torch.nan)
        yield self._launch(collect_steps, out, _PATIENCE)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)

    def _launch(self, kernel: object, *arguments: object) -> list[Steps]:
        loan, count = self.loan, self.programs
        assert callable(kernel)
        return [kernel(loan.mailbox, loan.borrower_state, *arguments, i, count) for i in range(count)]

    def go(self, turn: int) -> None:
        """One step of one program."""
        name = list(self.actors)[turn % len(self.actors)]
        programs = self.actors[name]
        if not programs and name == "borrower":
            self.over = True
            return
        if not programs:
            loan, count = self.loan, self.programs
            programs += [
                serve_steps(loan.mailbox, loan.lender_state, loan.lent, self.looks, count)
                for _ in range(count)
            ]
        chosen = programs[turn // len(self.actors) % len(programs)]
        before = int(self.loan.mailbox.word("done")) & MASK
        if next(chosen, self) is self:
            programs.remove(chosen)
            if not programs and name == "borrower":
                programs += next(self.asks, [])
        done = int(self.loan.mailbox.word("done")) & MASK
        if done != before:
            self.served.append(done)


@settings(max_examples=15)
@given(
    start=st.sampled_from([0, WRAPS, (1 << 31) - 1]),
    lanes=st.integers(1, 3),
    programs=st.integers(1, 3),
    ahead=st.integers(1, 2),
    looks=st.integers(0, 2),
    turns=st.lists(st.integers(0, 40), min_size=1, max_size=40),
)
def test_each_task_once_and_in_order(
    start: int, lanes: int, programs: int, ahead: int, looks: int, turns: list[int]
) -> None:
    """The drawn order of turns is gone through again and again, shifted by one each time, so that all have
    theirs."""
    ends = Ends(start, lanes, programs, steps=2, ahead=ahead, looks=looks)
    rounds = 0
    while not ends.over:
        rounds += 1
        assert rounds * len(turns) < 10_000, "nobody goes on"
        for turn in turns:
            ends.go(turn + rounds)
    assert ends.served == [(start + i + 1) & MASK for i in range(2 * LAYERS)]
    assert not int(ends.loan.borrower_state.status)
    assert not int(ends.loan.lender_state.over)
