"""One model's replicas, as a program sees them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvloom.cluster.dispatch import Dispatch, freest, infaas
from kvloom.cluster.freeness import Arrival
from kvloom.router.prefix_index import PrefixIndex
from kvloom.router.replica import Replica
from kvloom.types.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Fleet:
    """replicas: all, in the order of the config. arrival: the request that is to go to one of them. `among`
    are some of those that are up; left out, all."""

    model: str
    replicas: tuple[Replica, ...]
    index: PrefixIndex
    arrival: Arrival

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.up]

    def turn(self, among: Sequence[Replica] | None = None) -> Replica:
        """Round robin."""
        return self._chosen(min(self._candidates(among), key=lambda replica: replica.turn))

    def least_loaded(self, among: Sequence[Replica] | None = None) -> Replica:
        """Where they are equal, it is their turn."""
        candidates = self._candidates(among)
        return self._chosen(min(candidates, key=lambda replica: (replica.load, replica.turn)))

    def freest(self, among: Sequence[Replica] | None = None) -> Replica:
        """The one whose unit has most freeness with the request, or headroom for its level already, by its
        last report and what this router has sent there since. Where none has reported lately, the least
        loaded."""
        return self._by_reports(freest, among)

    def emptiest(self, among: Sequence[Replica] | None = None) -> Replica:
        """The one whose unit has least memory in use, what waits there counted: known as `freest` is."""
        return self._by_reports(infaas, among)

    def _by_reports(self, dispatch: Dispatch[Replica], among: Sequence[Replica] | None) -> Replica:
        candidates = self._candidates(among)
        loads = {replica: load for replica in candidates if (load := replica.report.expected())}
        chosen = dispatch(loads, {replica: replica.turn for replica in loads}, self.arrival)
        return self.least_loaded(candidates) if chosen is None else self._chosen(chosen)

    def nearest(
        self, prompt: Sequence[int], among: Sequence[Replica] | None = None, *, slack: int
    ) -> Replica:
        """The replica with the longest prefix of `prompt`, of those that have at most `slack` tokens of load
        more than the least loaded."""
        candidates, held = self._candidates(among), self.matched(prompt)
        least = min(replica.load for replica in candidates)
        near = [replica for replica in candidates if replica.load <= least + slack]
        longest = max(held.get(replica, 0) for replica in near)
        return self.least_loaded([replica for replica in near if held.get(replica, 0) == longest])

    def split(self, prefill: int) -> tuple[list[Replica], list[Replica]]:
        """Who prefills, the first `prefill` replicas, and who decodes. Where one side is down or missing, the
        other is all there is, and it decodes."""
        first = [replica for replica in self.replicas[:prefill] if replica.up]
        others = [replica for replica in self.replicas[prefill:] if replica.up]
        return (first, others) if first and others else ([], first or others)

    def matched(self, prompt: Sequence[int]) -> dict[Replica, int]:
        """Tokens of `prompt` that replicas which are up probably hold; those that hold none are left out."""
        if len(self.replicas) == 1:
            return {}
        held = self.index.match(self.model, prompt)
        return {replica: held[replica.name] for replica in self.up if replica.name in held}

    def to_compute(self, prompt: Sequence[int], replica: Replica, begin: int, end: int) -> int:
        """Tokens of prompt[begin:end] that `replica` probably has not cached."""
        return max(0, end - max(begin, self.matched(prompt).get(replica, 0)))

    def note(self, prompt: Sequence[int], replica: Replica) -> None:
        """`replica` holds the prompt now, or soon."""
        if len(self.replicas) > 1:
            self.index.note(self.model, prompt, replica.name)

    def without(self, some: Collection[Replica]) -> Fleet:
        return replace(self, replicas=tuple(one for one in self.replicas if one not in some))

    def _candidates(self, among: Sequence[Replica] | None) -> Sequence[Replica]:
        candidates = self.up if among is None else among
        if not candidates:
            names = ", ".join(_called(replica) for replica in self.replicas)
            raise Unavailable(f"no unit that serves {self.model} is up (of {names})", retry_after=1)
        return candidates

    def _chosen(self, replica: Replica) -> Replica:
        replica.turn = 1 + max(one.turn for one in self.replicas)
        return replica


def _called(replica: Replica) -> str:
    return f"{replica.name}, which failed to start" if replica.failed else replica.name
