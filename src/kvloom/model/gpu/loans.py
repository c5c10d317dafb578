"""What jobs on a device have to do with other units: rows that are away, and tasks of those who have
borrowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from kvloom.exec.cuda.device import Lane
from kvloom.exec.cuda.graphs import Buffers, DecodeSteps
from kvloom.exec.cuda.model import DeviceModel
from kvloom.model.gpu.attender import DeviceAttender
from kvloom.model.gpu.polling import PolledSteps
from kvloom.model.gpu.woven import LOOKS, WovenSteps
from kvloom.transport.device_loan import BorrowedDeviceBlocks
from kvloom.types.job import Job


class Loans:
    """models, buffers: the executor's own. What jobs ask of it they ask in a turn of their lane."""

    def __init__(
        self,
        models: Mapping[str, DeviceModel],
        buffers: dict[Lane, Buffers],
        lanes: Sequence[Lane],
        plain: set[str],
    ) -> None:
        """plain: models whose steps cannot be recorded."""
        self._models = models
        self._buffers = buffers
        self._lanes = lanes
        self._plain = plain
        self._attender: DeviceAttender | None = None
        self._polled: PolledSteps | None = None
        self._woven: dict[str, WovenSteps] = {}

    def lend(self, attender: DeviceAttender | None) -> None:
        """From the next job on forwards poll for its tasks; with None, none does. Waits for jobs that are
        asking the device just now."""
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.enter_context(lane.lock)
            if self._polled is not None:
                self._polled.close()
            for woven in list(self._woven.values()):  # the loop's thread changes them
                woven.forget()
            given = self._models, self._buffers, self._plain
            polls = attender is not None and not attender.launches
            self._polled = PolledSteps(attender, *given) if attender and polls else None
            self._attender = attender

    def borrow(self, model: str, loan: BorrowedDeviceBlocks, looks: int = LOOKS) -> None:
        """Its jobs may have rows away from here on. looks: as `collect` counts them."""
        self._woven[model] = WovenSteps(loan, self._models[model], self._buffers, self._plain, looks)

    def give_back(self, model: str) -> BorrowedDeviceBlocks:
        """No job of it runs that has."""
        return self._woven.pop(model).loan

    def woven(self, job: Job) -> WovenSteps | None:
        """Where rows of it are away."""
        return None if job.away is None else self._woven[job.model]

    def steps(self, job: Job, lane: Lane) -> DecodeSteps | None:
        """Where a decode job has to do with others."""
        woven, polled = self.woven(job), self._polled
        if woven is not None:
            return woven.steps(job, lane, self.poll)
        return None if polled is None else polled.steps(job, lane)

    @property
    def poll(self) -> Callable[[], None]:
        """What forwards do between operators."""
        return self._polled.attender.poll if self._polled else _nothing

    @contextmanager
    def polling(self, job: Job, lane: Lane) -> Iterator[None]:
        """While in it, a job asks for a forward that polls; or for one that is followed by a single look, and
        waited for, where tasks wait for the host. A forward with rows away polls as well, but while it waits
        for others somebody else has to attend for them."""
        attender = self._attender
        if attender is None or job.away is not None:
            yield
            return
        with attender.polled():
            yield
            if attender.launches:
                attender.poll()
                lane.mark().wait()


def _nothing() -> None:
    """Nobody has borrowed."""
