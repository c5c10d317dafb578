"""What becomes of a request when a replica has failed it."""

from __future__ import annotations

from typing import Final

from kvloom.router.call import Call
from kvloom.router.course import Lost
from kvloom.router.fleet import Fleet
from kvloom.router.replica import Replica
from kvloom.types.errors import KvloomError, OutOfBlocks, QueueFull, Unavailable

_ELSEWHERE: Final = (Unavailable, QueueFull, OutOfBlocks, Lost)  # what one replica says, another may not
DEATHS: Final = 3  # of engines with one request between two of its tokens; it may be what they die of


class Failures:
    """Of one request."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tokens = 0
        self._deaths = 0

    def may_go_on(self, error: KvloomError) -> bool:
        """Count one. True where a plain start_generate elsewhere may still give the rest: it is not the
        request itself that a replica has refused."""
        call = self._call
        if call.progress.tokens > self._tokens:
            self._tokens, self._deaths = call.progress.tokens, 0
        if isinstance(error, Unavailable | Lost):
            self._deaths += call.let_in
        if call.aborted or self._deaths > DEATHS:
            return False
        return isinstance(error, _ELSEWHERE) or not (call.course.refused or call.progress.begun)

    def keep(self, fleet: Fleet, error: KvloomError) -> Fleet:
        """Without the replicas that have refused the request, but for those that will be others when they
        are up again, and those that hold shorter contexts than the one that let it in promised. Where the
        connection to that one broke it may be another process already, and nobody counts as having refused;
        `DEATHS` bounds how often."""
        call = self._call
        if call.let_in and isinstance(error, Unavailable):
            call.course.refused.clear()
        refused = {one for one in call.course.refused if not self.awaits(one)}
        short = {one for one in fleet.replicas if one.card.context_length < call.course.needs}
        return fleet.without(refused | short)

    def awaits(self, replica: Replica) -> bool:
        """It will be up again, and that is worth waiting for: where it died, only for who had been let in."""
        return replica.awaited or (self._call.let_in and replica.lost)

    def awaited(self, fleet: Fleet) -> list[Replica]:
        return [replica for replica in fleet.replicas if self.awaits(replica)]
