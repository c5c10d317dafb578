"""Attends for another unit on a device, between the operators of this unit's own forwards (Weaver, section
4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloom.kernels.mail import Desk, End, Lent, Mail
from kvloom.model.gpu.operations import Operations
from kvloom.model.gpu.partitions import Lane


class DeviceAttender:
    """One loan's tasks, each done by the forward whose poll finds it. A poll is a launch on the forward's own
    lane, of which the host learns nothing; while no forward runs, nobody looks.

    Where the borrower breaks the rules the device takes no more tasks: `over` says so.
    """

    def __init__(
        self, mail: Mail, lent: Lent, lanes: Sequence[Lane], operations: Operations, start: int
    ) -> None:
        """start: what the mailbox' counters begin with."""
        self._mail = mail
        self._lent = lent
        self._lanes = list(lanes)
        self._operations = operations
        self._desk = Desk(len(lanes), start, mail.words.device)

    def poller(self, lane: Lane) -> Callable[[], None]:
        """Looks for a task once, on the lane, which must have been entered; may be recorded."""
        number = self._lanes.index(lane)
        return lambda: self._operations.serve(self._mail, self._desk, self._lent, number)

    @property
    def over(self) -> End:
        """Why no more tasks are taken; waits for what the device has been asked for."""
        return End(int(self._desk.over))

    def close(self) -> None:
        """Take no more tasks; when it returns, none is under way. No recording that polls may be replayed
        once the mailbox is gone."""
        if self.over is End.NONE:
            self._desk.over.fill_(End.CLOSED)
        over = self.over  # has reached the device
        for lane in self._lanes:
            with lane.lock:
                mark = lane.mark()
            mark.wait()
        self._mail.word("over").fill_(over)
