"""The seam `attend`: gets the output of a forward's offloaded rows, and lets a forward of a unit that lends
do the tasks of others between its operators. The backend puts mailboxes, servers and forwards together."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvloom.kernels.cpu.decode_step import NOWHERE
from kvloom.kv.arena import Arena
from kvloom.offload.cpu.attention_server import AttentionServer, OperatorSplit
from kvloom.offload.memory.borrower import BorrowedBlocks, TaskSender
from kvloom.offload.memory.lender import Lending
from kvloom.offload.terms import Borrow, Loan, on_this_loop, one_number, watched
from kvloom.types.errors import Conflict, KvloomError
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.job import ForwardPlan, Job, OffloadedRows
from kvloom.types.load import Waits
from kvloom.types.transfer import Transport

_PATIENCE = 10.0  # seconds for a layer's attention: then offloaded sequences are computed again at home


class RemoteAttention:
    """Attention of the last rows of one forward, done by a lender."""

    def __init__(self, tasks: TaskSender, home: int, plan: ForwardPlan, lost: str | None = None) -> None:
        """home: the number of rows before these. plan: over the loan's blocks. lost: the reason why the
        lender is not to be asked, if there is one. Raises ValueError if the plan is not one of a decode
        step."""
        if plan.versions is None or plan.copies or plan.sends or (plan.appends != 1).any():
            raise ValueError("offloaded rows: want a plain decode step, with the versions of its page map")
        self.home = home
        self.count = len(plan.sequences)
        self.positions = plan.positions
        self.lost = lost
        """The reason why the lender has not attended from some layer on; the attention of these rows is zeros
        then."""
        self._tasks = tasks
        if self.count and lost is None:
            lengths = (plan.starts + 1).astype(np.int32)
            tasks.begin(lengths, plan.tables, plan.page_map, plan.versions)

    def post(self, layer: int, qkv: Tensor, scale: float, window: int, softcap: float) -> int | None:
        """Posts a task for qkv [count, heads + 2 kv_heads, D], normalised and rotated. Returns its number."""
        if self.lost is None and self.count:
            try:
                return self._tasks.post(layer, qkv.numpy(), scale, window, softcap)
            except KvloomError as error:
                self.lost = error.message
        return None

    def collect(self, task: int | None, out: Tensor) -> None:
        """Waits for the output of a task, into out [count, heads, D]."""
        if task is not None:
            try:
                self._tasks.collect(task, out.numpy())
                return
            except KvloomError as error:
                self.lost = error.message
        out.zero_()

    # -- of a step in one kernel, which posts and collects by itself ----------------------------------

    def enter(self) -> int:
        """Returns the address of the AskArguments for a step that begins."""
        record = self._tasks.record
        record.rows, record.first, record.lost = self.count, self.home, self.lost is not None
        record.paused, record.resume, record.refused = NOWHERE, NOWHERE, 0
        self._tasks.spent[:] = 0
        return ctypes.addressof(record)

    @property
    def paused(self) -> bool:
        """Whether the step has stopped before its end, because an output has to be waited for."""
        return bool(self._tasks.record.paused != NOWHERE)

    def resume(self, qkv: Tensor, attended: Tensor, records: npt.NDArray[Any]) -> None:
        """Waits for that output, puts it into the rows of `attended` [B, heads · D], and lets the step go on
        from there. qkv [B, (heads + 2 kv_heads) · D or more]; records: the attention's of all layers."""
        record = self._tasks.record
        layer = int(record.paused)
        attention, form = records[layer], self._tasks.form
        task: int | None = record.count
        if record.refused:
            width = (form.heads + 2 * form.kv_heads) * form.head_dim
            rows = qkv[self.home :, :width].view(self.count, -1, form.head_dim)
            scoring = float(attention["scale"]), int(attention["window"]), float(attention["softcap"])
            task = self.post(layer, rows, *scoring)
        out = attended[self.home :, : form.heads * form.head_dim]
        self.collect(task, out.view(self.count, form.heads, form.head_dim))
        record.lost = self.lost is not None
        record.paused, record.resume, record.refused = NOWHERE, layer, 0

    def leave(self, layers: int) -> None:
        """Ends the step."""
        if self.lost is None:
            self._tasks.settle(layers)


class Polls:
    """The polls of one forward of a unit that lends: it does the tasks that have come, between its operators
    or their parts."""

    def __init__(self, server: AttentionServer, split: OperatorSplit) -> None:
        self.split = split
        self.pieces: list[float] = []
        """Seconds between two looks for tasks, less what tasks have taken."""
        self.longest = 0.0
        """The longest piece that is no attention, which has no parts."""
        self._server = server
        self._last: tuple[int, int] | None = None

    def poll(self) -> None:
        """Looks for tasks after a product, or another operator that is no attention."""
        self.longest = max(self.longest, self.attended())

    def attended(self) -> float:
        """Looks for tasks after attention. Returns the seconds since the last look."""
        began = self._last
        if began is None:
            self._server.enter()
        else:
            self._server.poll()
        now, busy = self._last = time.monotonic_ns(), self._server.busy
        if began is None:
            return 0.0
        self.pieces.append(max(0, now - began[0] - (busy - began[1])) / 1e9)
        return self.pieces[-1]

    def leave(self) -> None:
        """Ends the forward."""
        if self._last is not None:
            self._server.leave()


@dataclass(slots=True)
class ForwardOffload:
    """The part that one forward has in offloading, to and from other units."""

    remote: RemoteAttention | None = None
    polls: Polls | None = None
    lost: str | None = None
    """The reason why offloaded rows, and copies before the forward, do not count; None if they do. It is
    known when the forward has ended."""


class CpuLoans:
    """The loans of a unit, as its forwards use them. Any thread may run a forward."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.borrowed: dict[str, BorrowedBlocks] = {}
        """The loans that the unit's models have from others."""
        self.server: AttentionServer | None = None
        """The server of the loan to another unit, if there is one."""

    @contextmanager
    def attend(self, job: Job) -> Iterator[ForwardOffload]:
        """A context around the one forward of a job."""
        server = self.server
        if job.offloaded is not None:
            part = self.offloaded(job, job.offloaded)
            yield part
            part.lost = part.lost or (part.remote.lost if part.remote else None)
        elif server is None or not (server.launches or server.lively()):
            yield ForwardOffload()
        elif server.launches:
            with server.operator():
                yield ForwardOffload()
        else:
            polls = Polls(server, server.split(job.model))
            try:
                yield ForwardOffload(polls=polls)
            finally:
                polls.leave()
            if polls.pieces:
                polls.split.ran(len(job.tokens), polls.longest, polls.pieces)

    def offloaded(self, job: Job, rows: OffloadedRows) -> ForwardOffload:
        """Copies the K and V that move, and begins the attention of the offloaded rows."""
        loan, lost = self.borrowed[job.model], None
        try:
            for move in rows.moves:
                loan.move(self._arena.bytes.numpy(), job.plan.page_map, rows.plan.page_map, move)
        except KvloomError as error:
            lost = error.message
        remote = RemoteAttention(loan.tasks, len(job.plan.sequences), rows.plan, lost)
        return ForwardOffload(remote if remote.count else None, lost=remote.lost)


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

    def take_back(self, numbers: AnyArray) -> None:
        server = self._executor.loans.server
        assert server is not None
        server.take_back(numbers)

    def recall(self) -> bool:
        server, self._executor.loans.server = self._executor.loans.server, None
        if server is not None:
            server.close()
        if self._lending is not None and not self._lending.close():
            return False
        self._lending = None
        return True
