"""The kernels that work a mailbox against their twins, in any order and on anything that a borrower may
write."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kernels import mailbox_reference
from kvloom.kernels.cuda import offload_ask as ask
from kvloom.kernels.cuda import offload_serve as serve
from kvloom.kernels.mailbox import MASK, SPAN, End
from tests.kernels.loaned import LAYERS, WRAPS, Loaned, Shape, same, scale_of

_SHAPE = Shape(kv_heads=2, group=1, head_dim=4, tokens=2, rows=2)
_SCALE = scale_of(_SHAPE)


class Play:
    """A loan that kernels work, and the same that their twins do."""

    def __init__(self, start: int, span: int = SPAN) -> None:
        self.loan, self.twin = (Loaned(_SHAPE, start, span=span) for _ in range(2))
        self.wanted: list[torch.Tensor] = []
        self.posted = self.step = 0

    def begin(self) -> None:
        self.step += 1
        for one in (self.loan, self.twin):
            one.begin([self.step, 3])
            self.asked = one.rows(2)  # both draw the same

    def post(self) -> None:
        """A step's tasks are posted once all before are collected."""
        layer = self.posted % LAYERS
        if len(self.wanted) == _SHAPE.slots or (self.wanted and not layer):
            return
        if not layer:
            self.begin()
        q, k, v = self.asked
        ask.post(self.loan.mailbox, self.loan.borrower_state, q, k, v, layer, _SCALE, programs=2)
        mailbox_reference.post(self.twin.mailbox, self.twin.borrower_state, q, k, v, layer, _SCALE)
        self.wanted.append(self.loan.wanted(layer, q, k, v, _SCALE))
        self.twin.wanted(layer, q, k, v, _SCALE)  # its tokens count as computed too, or it would draw others
        self.posted += 1

    def serve(self, programs: int) -> None:
        serve.serve(self.loan.mailbox, self.loan.lender_state, self.loan.lent, programs=programs)
        mailbox_reference.serve(self.twin.mailbox, self.twin.lender_state, self.twin.lent, programs=programs)

    def collect(self) -> None:
        done = int(self.loan.mailbox.word("done"))
        if not self.wanted or done == int(self.loan.borrower_state.words[1]):
            return  # it would wait
        out = torch.full((2, _SHAPE.heads, _SHAPE.head_dim), torch.nan)
        ask.collect(self.loan.mailbox, self.loan.borrower_state, out, 0, programs=2)
        mailbox_reference.collect(self.twin.mailbox, self.twin.borrower_state, out.clone(), 0)
        torch.testing.assert_close(out.double(), self.wanted.pop(0), rtol=2e-5, atol=2e-5)


@settings(max_examples=4)
@given(
    start=st.sampled_from([0, WRAPS, (1 << 31) - 1]),
    span=st.sampled_from([1, SPAN]),
    turns=st.lists(st.sampled_from(["post", "serve", "more", "collect"]), min_size=4, max_size=14),
)
def test_launches_in_any_order(start: int, span: int, turns: list[str]) -> None:
    """Each task is done once and in order, and the kernels leave what their twins leave; of rows that are cut
    as well."""
    play = Play(start, span)
    for turn in turns:
        if turn in ("serve", "more"):
            play.serve(3 if turn == "more" else 1)
        else:
            getattr(play, turn)()
        same(play.loan, play.twin)
    while play.wanted:
        play.serve(2)
        play.collect()
    assert int(play.loan.mailbox.word("done")) & MASK == (start + play.posted) & MASK
    assert not int(play.loan.borrower_state.status)


@settings(max_examples=10)
@given(data=st.data())
def test_bytes_at_random_are_refused_or_confined(data: st.DataObject) -> None:
    """Blocks that are not lent stay what they are, NaN, and nothing of them is seen."""
    play = Play(WRAPS)
    play.post()
    for name in data.draw(st.lists(st.sampled_from(["head", "lengths", "tables", "map", "places"]))):
        at = data.draw(st.integers(0, 1 << 16))
        value = data.draw(st.one_of(st.integers(-2, 8), st.integers(-(2**31), 2**31 - 1)))
        for one in (play.loan, play.twin):
            words = getattr(one.mailbox, name)
            words[at % len(words)].view(-1)[at // len(words) % words[0].numel()] = value
    others = torch.ones(len(play.loan.lent.arena), dtype=torch.bool)
    others[play.loan.lent.blocks.long()] = False
    play.serve(2)
    same(play.loan, play.twin)
    assert play.loan.lent.arena[others].isnan().all()
    assert not play.loan.lent.arena[~others].isnan().any()
    assert not play.loan.mailbox.out.isnan().any()
    refused = int(play.loan.lender_state.over) == End.FORGED
    assert int(play.loan.mailbox.word("done")) & MASK == (WRAPS + (not refused)) & MASK
