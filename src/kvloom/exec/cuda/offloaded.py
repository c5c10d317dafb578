"""The seam `attend` on a GPU: decode steps of which some rows are offloaded, posted and collected layer by
layer by kernels alone, and steps of a unit that lends, recorded with its polls in them (Weaver, section
4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from kvloom.exec.attention import Scoring
from kvloom.exec.cuda.device import PartitionLane
from kvloom.exec.cuda.graphs import Buffers, DecodeSteps
from kvloom.exec.cuda.model import DecodeState, DeviceModel
from kvloom.exec.cuda.staging import SentInputs
from kvloom.exec.fuse import MergedLinearPart
from kvloom.kernels.mailbox import Trouble
from kvloom.offload.cuda import LOOKS, CudaAttentionServer
from kvloom.offload.memory.device import BorrowedDeviceBlocks, BorrowerDeviceMailbox
from kvloom.types.errors import KvloomError
from kvloom.types.geometry import AnyArray
from kvloom.types.job import Job


class OffloadedState(DecodeState):
    """The task descriptor names the offloaded rows, which are padding here until they are collected."""

    def __init__(self, *rest: Any, mailbox: BorrowerDeviceMailbox, looks: int) -> None:
        super().__init__(*rest)
        self._mailbox = mailbox
        self._looks = looks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Posts the offloaded rows first; those at home are computed meanwhile."""
        tensors, state = self._mailbox.tensors, self._mailbox.state
        form = scoring.scale, scoring.window, scoring.softcap
        self._operations.post(tensors, state, q, k, v, layer, *form)
        out = super().attend(layer, q, k, v, scoring)
        self._operations.collect(tensors, state, out, self._looks)
        return out


class _OffloadedSteps(DecodeSteps):
    def __init__(self, mailbox: BorrowerDeviceMailbox, *rest: Any) -> None:
        super().__init__(*rest)
        self._mailbox = mailbox

    def record(self, *given: Any) -> bool:
        self._mailbox.rest()  # what runs while it is recorded posts nothing
        return super().record(*given)

    def arrays(self, job: Job) -> dict[str, AnyArray]:
        assert job.offloaded is not None
        plan = job.offloaded.plan
        if plan.versions is None or plan.copies or plan.sends or (plan.appends != 1).any():
            raise ValueError("offloaded rows: want a plain decode step, with the versions of its page map")
        lengths, first = (plan.starts + 1).astype("int32"), len(job.plan.sequences)
        rows: dict[str, AnyArray] = {}
        if plan.sequences:
            rows = self._mailbox.describe(lengths, plan.tables, plan.page_map, plan.versions, first)
        return super().arrays(job) | rows

    def run(self, sent: SentInputs) -> Tensor:
        if "offloaded_step" in sent.arrays:
            self._mailbox.begin(sent.arrays)
        else:
            self._mailbox.rest()
        return super().run(sent)


class OffloadedSteps:
    """The decode steps of one model for one loan: recordings have its mailbox' address. Each is made when a
    batch first needs it, by a thread that holds the lane's lock. One job at a time has offloaded rows."""

    def __init__(
        self,
        loan: BorrowedDeviceBlocks,
        model: DeviceModel,
        buffers: dict[PartitionLane, Buffers],
        plain: set[str],
        looks: int,
    ) -> None:
        """plain: models whose steps cannot be recorded."""
        self.loan = loan
        self._model = model
        self._buffers = buffers
        self._state = partial(OffloadedState, mailbox=loan.mailbox, looks=looks)
        self._steps: dict[PartitionLane, _OffloadedSteps] = {}
        self._plain = plain
        self._failure: str | None = None

    def move(self, arena: Tensor, job: Job) -> None:
        """Copies what the job begins with, between `arena`, all bytes of this unit's, and the loan. If that
        fails the loan is over, and the job goes on without."""
        assert job.offloaded is not None
        try:
            for move in job.offloaded.moves:
                self.loan.move(arena, job.plan.page_map, job.offloaded.plan.page_map, move)
        except KvloomError as error:
            self._failure = error.message

    def steps(self, job: Job, lane: PartitionLane, poll: Callable[[], None]) -> DecodeSteps:
        """Returns steps with a recording of the job's size, if the model can be recorded. The caller has a
        turn of the lane."""
        mailbox, buffers = self.loan.mailbox, self._buffers[lane]
        if self._failure is not None:
            mailbox.fail(Trouble.GONE)
        known = self._steps.get(lane)
        if known is None:
            known = _OffloadedSteps(mailbox, self._model, lane, buffers, poll, self._state)
            self._steps[lane] = known
        known.record_late(job.tokens.size, self._plain)
        return known

    def forget(self) -> None:
        """Forgets recordings, because the loan has changed for which they were made."""
        self._steps.clear()

    def lost(self) -> str | None:
        """Returns why the offloaded rows of a job that has ended do not count."""
        return self._failure or self.loan.why(int(self.loan.mailbox.state.status))


class PolledSteps:
    """Decode steps that poll for one loan: recordings have its mailbox' address. Each is made when a batch
    first needs it, by a thread that holds the lane's lock. They are made and closed while no forward runs."""

    def __init__(
        self,
        server: CudaAttentionServer,
        models: Mapping[str, DeviceModel],
        buffers: Mapping[PartitionLane, Buffers],
        plain: set[str],
    ) -> None:
        """plain: models whose steps cannot be recorded."""
        self.server = server
        self._models = models
        self._buffers = buffers
        self._steps: dict[tuple[str, PartitionLane], DecodeSteps] = {}
        self._plain = plain
        self._hooks = [
            product.register_forward_hook(lambda *_: server.poll())
            for model in models.values()
            for product in _products(model.module)
        ]

    def steps(self, job: Job, lane: PartitionLane) -> DecodeSteps:
        """Returns steps with a recording of the job's size, if the model can be recorded."""
        known = self._steps.get((job.model, lane))
        if known is None:
            model, poll = self._models[job.model], self.server.poll
            known = self._steps[job.model, lane] = DecodeSteps(model, lane, self._buffers[lane], poll)
        known.record_late(job.tokens.size, self._plain)
        return known

    def close(self) -> None:
        """Lets forwards poll no more."""
        for hook in self._hooks:
            hook.remove()


def _products(module: nn.Module) -> Iterator[nn.Linear]:
    """Returns each product once; merged layers have one together."""
    found = (one.product if isinstance(one, MergedLinearPart) else one for one in module.modules())
    yield from {id(one): one for one in found if isinstance(one, nn.Linear)}.values()


class CudaLoans:
    """The part that a unit's forwards have in loans. Jobs call it in a turn of their lane."""

    def __init__(
        self,
        models: Mapping[str, DeviceModel],
        buffers: dict[PartitionLane, Buffers],
        lanes: Sequence[PartitionLane],
        plain: set[str],
    ) -> None:
        """models, buffers: the executor's own. plain: models whose steps cannot be recorded."""
        self._models = models
        self._buffers = buffers
        self._lanes = lanes
        self._plain = plain
        self._server: CudaAttentionServer | None = None
        self._polled: PolledSteps | None = None
        self._borrowed: dict[str, OffloadedSteps] = {}

    def lend(self, server: CudaAttentionServer | None) -> None:
        """Lets forwards poll for the server's tasks from the next job on; with None, none does. Waits for
        jobs that are asking the device just now."""
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.enter_context(lane.lock)
            if self._polled is not None:
                self._polled.close()
            for steps in list(self._borrowed.values()):  # the loop's thread changes them
                steps.forget()
            given = self._models, self._buffers, self._plain
            polls = server is not None and not server.launches
            self._polled = PolledSteps(server, *given) if server and polls else None
            self._server = server

    def borrow(self, model: str, loan: BorrowedDeviceBlocks, looks: int = LOOKS) -> None:
        """Lets the model's jobs have offloaded rows from here on. looks: as `collect` counts them."""
        self._borrowed[model] = OffloadedSteps(loan, self._models[model], self._buffers, self._plain, looks)

    def give_back(self, model: str) -> BorrowedDeviceBlocks:
        """Ends a loan while no job of the model with offloaded rows runs."""
        return self._borrowed.pop(model).loan

    def offloaded(self, job: Job) -> OffloadedSteps | None:
        """Returns the steps of a job with offloaded rows; None for any other."""
        return None if job.offloaded is None else self._borrowed[job.model]

    def steps(self, job: Job, lane: PartitionLane) -> DecodeSteps | None:
        """Returns the steps of a decode job that has to do with other units; None for any other."""
        offloaded, polled = self.offloaded(job), self._polled
        if offloaded is not None:
            return offloaded.steps(job, lane, self.poll)
        return None if polled is None else polled.steps(job, lane)

    @property
    def polls(self) -> bool:
        """Whether forwards look for tasks between their operators."""
        return self._polled is not None

    @property
    def poll(self) -> Callable[[], None]:
        """The action of forwards between operators."""
        return self._polled.server.poll if self._polled else _nothing

    @contextmanager
    def attend(self, job: Job, lane: PartitionLane) -> Iterator[None]:
        """A context around a forward that a job asks for. The forward polls. If tasks wait for the host, a
        single look for them follows, and the job waits for both. A forward with offloaded rows polls as well,
        but while it waits for another unit somebody else has to do the tasks."""
        server = self._server
        if server is None or job.offloaded is not None:
            yield
            return
        with server.polled():
            yield
            if server.launches:
                server.poll()
                lane.mark().wait()


def _nothing() -> None:
    """Does nothing, because nobody has borrowed."""
