"""Decode steps of which some rows are away: posted to another unit's device and collected from there, layer
by layer, by kernels alone (Weaver, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import Tensor

from kvloom.exec.attention import Scoring
from kvloom.exec.cuda.device import Lane
from kvloom.exec.cuda.graphs import Buffers, DecodeSteps
from kvloom.exec.cuda.model import DecodeState, DeviceModel
from kvloom.exec.cuda.staging import Sent
from kvloom.kernels.mail import Trouble
from kvloom.transport.device_loan import BorrowedDeviceBlocks
from kvloom.transport.device_mailbox import BorrowedMailbox
from kvloom.types.errors import KvloomError
from kvloom.types.geometry import AnyArray
from kvloom.types.job import Job

LOOKS: Final = 20_000_000  # of a `collect`, some ten seconds: a lender's first task finds its kernel compiled


class WovenState(DecodeState):
    """The mailbox' sheet says which rows are away; here they are padding, until they are collected."""

    def __init__(self, *rest: Any, mailbox: BorrowedMailbox, looks: int) -> None:
        super().__init__(*rest)
        self._mailbox = mailbox
        self._looks = looks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The rows away go first, those at home are computed meanwhile."""
        mail, pad = self._mailbox.mail, self._mailbox.pad
        form = scoring.scale, scoring.window, scoring.softcap
        self._operations.post(mail, pad, q, k, v, layer, *form)
        out = super().attend(layer, q, k, v, scoring)
        self._operations.collect(mail, pad, out, self._looks)
        return out


class _Steps(DecodeSteps):
    def __init__(self, mailbox: BorrowedMailbox, *rest: Any) -> None:
        super().__init__(*rest)
        self._mailbox = mailbox

    def record(self, *given: Any) -> bool:
        self._mailbox.rest()  # what runs while it is recorded posts nothing
        return super().record(*given)

    def arrays(self, job: Job) -> dict[str, AnyArray]:
        assert job.away is not None
        plan = job.away.plan
        if plan.versions is None or plan.copies or plan.sends or (plan.appends != 1).any():
            raise ValueError("away: want a plain decode step, with the versions of its page map")
        lengths, first = (plan.starts + 1).astype("int32"), len(job.plan.sequences)
        sheet: dict[str, AnyArray] = {}
        if plan.sequences:
            sheet = self._mailbox.sheet(lengths, plan.tables, plan.page_map, plan.versions, first)
        return super().arrays(job) | sheet

    def run(self, sent: Sent) -> Tensor:
        if "away_step" in sent.arrays:
            self._mailbox.begin(sent.arrays)
        else:
            self._mailbox.rest()
        return super().run(sent)


class WovenSteps:
    """Of one model, for one loan: recordings have its mailbox' address. Each is made when a batch first needs
    it, by a thread that holds the lane's lock. One job at a time has rows away."""

    def __init__(
        self,
        loan: BorrowedDeviceBlocks,
        model: DeviceModel,
        buffers: dict[Lane, Buffers],
        plain: set[str],
        looks: int,
    ) -> None:
        """plain: models whose steps cannot be recorded."""
        self.loan = loan
        self._model = model
        self._buffers = buffers
        self._state = partial(WovenState, mailbox=loan.mailbox, looks=looks)
        self._steps: dict[Lane, _Steps] = {}
        self._plain = plain
        self._failure: str | None = None

    def move(self, arena: Tensor, job: Job) -> None:
        """Copy what the job begins with, between `arena`, all bytes of this unit's, and the loan. Where that
        fails the loan is over, and the job goes on without."""
        assert job.away is not None
        try:
            for move in job.away.moves:
                self.loan.move(arena, job.plan.page_map, job.away.plan.page_map, move)
        except KvloomError as error:
            self._failure = error.message

    def steps(self, job: Job, lane: Lane, poll: Callable[[], None]) -> DecodeSteps:
        """With a recording of the job's size, where the model can be recorded. In a turn of the lane."""
        mailbox, buffers = self.loan.mailbox, self._buffers[lane]
        if self._failure is not None:
            mailbox.fail(Trouble.GONE)
        known = self._steps.get(lane)
        if known is None:
            known = _Steps(mailbox, self._model, lane, buffers, poll, self._state)
            self._steps[lane] = known
        known.record_late(job.tokens.size, self._plain)
        return known

    def forget(self) -> None:
        """Recordings: what they poll for has changed."""
        self._steps.clear()

    def lost(self) -> str | None:
        """Once a job has ended: why its rows that were away do not count."""
        return self._failure or self.loan.why(int(self.loan.mailbox.pad.status))
