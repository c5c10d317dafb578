"""Into how many parts the operators of a unit's own decode steps are split, so that another unit's tasks wait
less (Weaver, section 4.2)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from kvloom.kernels.cpu.offload_serve import LookArguments
from kvloom.types.geometry import F64, I64
from kvloom.types.offload import Rule, split

_AGAIN = 32  # steps after which the plan is made anew
_NEW = 0.1  # weight of a step in the mean of an operator's time
_FEWEST = 32  # rows of a run: fewer would have the weights read too often


class Split:
    """Of one model's forwards. Operators are the step kernel's stages. parts [S]: of each. The kernel says
    what each part took: `pieces`, in nanoseconds, of which ends [S] are there after each operator."""

    def __init__(self, poll: int, rule: Callable[[], Rule | None], landed: Callable[[F64], None]) -> None:
        """poll: the address of the loan's PollArguments. rule: None while nothing is to be split. landed:
        called after each step with the times of all parts, in seconds."""
        self.record = LookArguments(poll=poll)
        self.address = ctypes.addressof(self.record)
        self._rule = rule
        self._landed = landed
        self._means: list[float] = []
        self._left = 1
        self._limits: Sequence[int] = ()
        self._longest = 0.0  # seconds a row, of the longest product of forwards that go layer by layer
        self._runs = 1  # of the last such forward
        self.parts: I64 = np.ones(0, np.int64)
        self.ends: I64 = np.zeros(0, np.int64)
        self.pieces: I64 = np.zeros(0, np.int64)

    def runs(self, rows: int) -> int:
        """Into how many runs of rows a forward of many, which goes layer by layer, cuts its products: so many
        that the longest, did all take as long, would stall by no more than is allowed."""
        rule = self._rule()
        bound = rule.ahead + 2 * rule.most if rule else 0.0
        wanted = -(-self._longest * rows // bound) if bound else 1
        self._runs = int(max(1, min(wanted, rows // _FEWEST)))
        return self._runs

    def ran(self, rows: int, longest: float, times: list[float]) -> None:
        """Such a forward has ended; it looked for tasks after each of these times, in seconds. longest: of
        its products."""
        self._longest = longest * self._runs / rows
        self._landed(np.array(times))

    def begin(self, limits: Sequence[int], threads: int = 1) -> None:
        """A step of operators that can have so many parts each, of which the thread that looks may do all,
        and looks `threads` times as often then."""
        self._limits = limits
        if len(self.parts) != len(limits):
            self.parts = np.ones(len(limits), np.int64)
            self.ends = np.zeros(len(limits), np.int64)
            self._means = []
        most = int(self.parts.sum()) * threads
        if most > len(self.pieces):
            self.pieces = np.zeros(2 * most, np.int64)
        self.record.pieces, self.record.most = self.pieces.ctypes.data, len(self.pieces)

    def end(self) -> None:
        """The step has ended. Now and then its operators are split anew."""
        pieces = np.maximum(self.pieces[: self.ends[-1]], 0) / 1e9
        took: list[float] = np.diff(np.append(0.0, pieces.cumsum())[self.ends], prepend=0.0).tolist()
        means = self._means or took
        self._means = [(1 - _NEW) * mean + _NEW * new for mean, new in zip(means, took, strict=True)]
        self._left -= 1
        if not self._left:
            self._left = _AGAIN
            rule = self._rule()
            self.parts[:] = split(self._means, *rule, self._limits) if rule else 1
        self._landed(pieces)
