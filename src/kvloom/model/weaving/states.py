"""Forwards that take part in weaving: at the lender they poll, at the borrower some rows are away."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState, Scoring
from kvloom.model.weaving.asking import Asking
from kvloom.model.weaving.attender import Attender
from kvloom.model.weaving.split import Split
from kvloom.transport.tasks import TaskSender
from kvloom.types.geometry import I64
from kvloom.types.offload import Away


@dataclass(slots=True)
class PolledState(ForwardState):
    """Of a unit that lends: between its operators, or their parts, it looks for tasks."""

    attender: Attender
    split: Split
    pieces: list[float] = field(default_factory=list)  # seconds between looks
    longest: float = 0.0  # of them that are no attention, which has no parts
    _last: tuple[int, int] = (0, 0)
    _entered: bool = False

    @property
    def polled(self) -> Split:
        return self.split

    def leave(self) -> None:
        """The forward has ended."""
        if self._entered:
            self.attender.leave()

    def poll(self) -> None:
        self.longest = max(self.longest, self._looked())

    def _looked(self) -> float:
        """Look for tasks. Seconds since the last look, less what tasks have taken."""
        began, busy = self._last
        if self._entered:
            self.attender.poll()
        else:
            self._entered = True
            self.attender.enter()
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
    """A decode step of which the rows of `away`, after those of `plan`, are computed by the lender."""

    away: Away
    tasks: TaskSender
    lost_before: InitVar[str | None] = None  # why nobody is to be asked
    _asking: Asking = field(init=False)

    def __post_init__(self, lost_before: str | None) -> None:
        ForwardState.__post_init__(self)
        plan = self.away.plan
        self._asking = Asking(self.tasks, len(self.plan.sequences), len(plan.sequences), lost_before)
        if plan.versions is None or plan.copies or plan.sends or (plan.appends != 1).any():
            raise ValueError("away: want a plain decode step, with the versions of its page map")
        if plan.sequences and self.lost is None:
            lengths = (plan.starts + 1).astype(np.int32)
            self.tasks.begin(lengths, plan.tables, plan.page_map, plan.versions)

    @property
    def lost(self) -> str | None:
        """Why the lender has not attended for the rows away, which mean nothing then."""
        return self._asking.lost

    @property
    def asking(self) -> Asking | None:
        return self._asking if self._asking.count else None

    @property
    def positions(self) -> I64:
        return np.concatenate([self.plan.positions, self.away.plan.positions])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The rows away go first, those at home are computed meanwhile."""
        home = len(self.lengths)
        count = home + len(self.away.plan.sequences)
        out = torch.empty(q.shape, dtype=q.dtype)
        new = torch.cat((q, k, v), 1)[home:count]
        task = self._asking.post(layer, new, scoring.scale, scoring.window, scoring.softcap)
        if home:
            self._write(layer, k[:home], v[:home])
            self._decode(layer, q[:home], out[:home], scoring)
        if home < count:
            self._asking.collect(task, out[home:count])
        out[count:] = out[count - 1]
        return out
