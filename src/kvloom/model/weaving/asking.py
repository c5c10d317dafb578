"""Has a lender attend for rows of one forward."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch import Tensor

from kvloom.kernels.cpu.decode_step import NOWHERE
from kvloom.transport.tasks import TaskSender
from kvloom.types.errors import KvloomError


@dataclass(slots=True)
class Asking:
    """`count` rows, after `home` others that are attended for here. The tasks' iteration has begun, or `lost`
    says why not: the lender has not attended from where it failed on, and their attention is zeros then."""

    tasks: TaskSender
    home: int
    count: int
    lost: str | None = None

    def post(self, layer: int, qkv: Tensor, scale: float, window: int, softcap: float) -> int | None:
        """qkv [count, heads + 2 kv_heads, D], normalised and rotated. Returns the task."""
        if self.lost is None and self.count:
            try:
                return self.tasks.post(layer, qkv.numpy(), scale, window, softcap)
            except KvloomError as error:
                self.lost = error.message
        return None

    def collect(self, task: int | None, out: Tensor) -> None:
        """out: [count, heads, D]."""
        if task is not None:
            try:
                self.tasks.collect(task, out.numpy())
                return
            except KvloomError as error:
                self.lost = error.message
        out.zero_()

    # -- of a step in one kernel, which posts and collects by itself ----------------------------------

    def enter(self) -> int:
        """The address of its AskArguments, for a step that begins."""
        record = self.tasks.record
        record.rows, record.first, record.lost = self.count, self.home, self.lost is not None
        record.paused, record.resume, record.refused = NOWHERE, NOWHERE, 0
        self.tasks.spent[:] = 0
        return ctypes.addressof(record)

    @property
    def paused(self) -> bool:
        """The step has ended before its end: somebody is to wait for an output."""
        return bool(self.tasks.record.paused != NOWHERE)

    def resume(self, qkv: Tensor, mixed: Tensor, turns: npt.NDArray[Any]) -> None:
        """Wait for it, into the rows of mixed [B, heads · D], and let the step go on from there. qkv [B,
        (heads + 2 kv_heads) · D or more]; turns: the attention's records of all layers."""
        record = self.tasks.record
        layer = int(record.paused)
        turn, form = turns[layer], self.tasks.form
        task: int | None = record.count
        if record.refused:
            width = (form.heads + 2 * form.kv_heads) * form.head_dim
            rows = qkv[self.home :, :width].view(self.count, -1, form.head_dim)
            scoring = float(turn["scale"]), int(turn["window"]), float(turn["softcap"])
            task = self.post(layer, rows, *scoring)
        out = mixed[self.home :, : form.heads * form.head_dim]
        self.collect(task, out.view(self.count, form.heads, form.head_dim))
        record.lost = self.lost is not None
        record.paused, record.resume, record.refused = NOWHERE, layer, 0

    def leave(self, layers: int) -> None:
        """The step has ended."""
        if self.lost is None:
            self.tasks.settle(layers)
