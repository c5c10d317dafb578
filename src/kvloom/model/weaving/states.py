"""Forwards that take part in weaving: at the lender they poll, at the borrower some rows are away."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvloom.core.arrays import I64
from kvloom.core.errors import KvloomError
from kvloom.core.weaving import Away
from kvloom.model.attention import ForwardState, Scoring
from kvloom.model.weaving.attender import Attender
from kvloom.model.weaving.split import Split
from kvloom.transport.loan import BorrowedBlocks


@dataclass(slots=True)
class PolledState(ForwardState):
    """Of a unit that lends: between its operators, or their parts, it looks for tasks."""

    attender: Attender
    split: Split
    pieces: list[float] = field(default_factory=list)  # seconds between looks
    longest: float = 0.0  # of them that are no attention, which has no parts
    _last: tuple[int, int] = (0, 0)

    @property
    def polled(self) -> Split:
        return self.split

    def poll(self) -> None:
        self.longest = max(self.longest, self._looked())

    def _looked(self) -> float:
        """Look for tasks. Seconds since the last look, less what tasks have taken."""
        began, busy = self._last
        self.attender.poll()
        self._last = time.monotonic_ns(), self.attender.busy
        if not began:
            return 0.0
        self.pieces.append(max(0, self._last[0] - began - (self._last[1] - busy)) / 1e9)
        return self.pieces[-1]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.poll()
        out = ForwardState.attend(self, layer, q, k, v, scoring)
        self._looked()
        return out


@dataclass(slots=True)
class WovenState(ForwardState):
    """A decode step of which the rows of `away`, after those of `plan`, are computed by the lender.

    lost: why it has not, from where it failed on; the attention of those rows is zeros then.
    """

    away: Away
    loan: BorrowedBlocks
    lost: str | None = None

    def __post_init__(self) -> None:
        ForwardState.__post_init__(self)
        plan = self.away.plan
        if plan.versions is None or plan.copies or plan.sends or (plan.appends != 1).any():
            raise ValueError("away: want a plain decode step, with the versions of its page map")
        if plan.sequences and self.lost is None:
            lengths = (plan.starts + 1).astype(np.int32)
            self.loan.tasks.begin(lengths, plan.tables, plan.page_map, plan.versions)

    @property
    def layered(self) -> bool:
        return True

    @property
    def positions(self) -> I64:
        return np.concatenate([self.plan.positions, self.away.plan.positions])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The rows away go first, those at home are computed meanwhile."""
        home = len(self.lengths)
        count = home + len(self.away.plan.sequences)
        out = torch.empty(q.shape, dtype=q.dtype)
        task = self._post(layer, torch.cat((q, k, v), 1)[home:count], scoring)
        if home:
            self._write(layer, k[:home], v[:home])
            self._decode(layer, q[:home], out[:home], scoring)
        self._collect(task, out[home:count])
        out[count:] = out[count - 1]
        return out

    def _post(self, layer: int, qkv: Tensor, scoring: Scoring) -> int | None:
        if self.lost is None and len(qkv):
            try:
                return self.loan.tasks.post(
                    layer, qkv.numpy(), scoring.scale, scoring.window, scoring.softcap
                )
            except KvloomError as error:
                self.lost = error.message
        return None

    def _collect(self, task: int | None, out: Tensor) -> None:
        if task is not None:
            try:
                self.loan.tasks.collect(task, out.numpy())
                return
            except KvloomError as error:
                self.lost = error.message
        out.zero_()
