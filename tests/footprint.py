"""What a process holds of its machine: memory, descriptors and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.procfs import PROC, memory

SLACK_MIB: Final = 2.0  # of what an allocator keeps for the next request


@dataclass(frozen=True, slots=True)
class Footprint:
    """mib: resident memory that is the process's own, without the arena and without mapped checkpoints."""

    mib: float
    descriptors: int
    threads: int

    @staticmethod
    def of(pid: int) -> Footprint:
        """Raises OSError if there is no such process."""
        found, folder = memory(pid), PROC / str(pid)
        descriptors = len(list((folder / "fd").iterdir()))
        return Footprint(
            found.rss - found.arena - found.files, descriptors, len(list((folder / "task").iterdir()))
        )

    def growth(self, later: Footprint, *, share: float) -> str:
        """Returns in words what has grown since, beyond `share` of the memory; empty if nothing has."""
        grown = []
        if later.mib > self.mib * (1 + share) + SLACK_MIB:
            grown.append(f"memory {self.mib:.0f} to {later.mib:.0f} MiB")
        if later.descriptors > self.descriptors:
            grown.append(f"descriptors {self.descriptors} to {later.descriptors}")
        if later.threads > self.threads:
            grown.append(f"threads {self.threads} to {later.threads}")
        return ", ".join(grown)
