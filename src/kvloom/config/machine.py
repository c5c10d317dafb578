"""The cores, the memory and the GPUs that a fleet on this machine may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvloom.kv.memory import CGROUP, available_memory


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that a machine has for a fleet."""

    cores: int
    """The cores whose time this process may have."""
    memory: int
    """Bytes that an arena may take now."""
    gpus: int = 0
    """NVIDIA's GPUs that CUDA would show to this process."""
    name: str = ""
    """The name of the node that it is; empty if nobody has to know."""
    nodes: tuple[str, ...] = ()
    """The nodes of the cluster for which this stands; none if it is one machine."""
    least: Machine | None = None
    """The resources that each of these nodes has at least; None if it is one machine."""

    @classmethod
    def together(cls, machines: Sequence[Machine]) -> Machine:
        """Returns what the nodes of a cluster have in all."""
        return cls(
            cores=sum(one.cores for one in machines),
            memory=sum(one.memory for one in machines),
            gpus=sum(one.gpus for one in machines),
            nodes=tuple(one.name for one in machines),
            least=cls(
                cores=min((one.cores for one in machines), default=0),
                memory=min((one.memory for one in machines), default=0),
                gpus=min((one.gpus for one in machines), default=0),
            ),
        )

    @classmethod
    def here(cls) -> Machine:
        return cls(cores=available_cores(), memory=available_memory(), gpus=_gpus(), name=platform.node())


def available_cores(cgroup: Path = CGROUP) -> int:
    """Returns the number of cores that this process may use, or the smaller one whose time a container's own
    limit allows, and 1 at least: more threads than that would only take turns."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Returns the cores whose time a container's own limit allows; None if it sets no limit."""
    with suppress(OSError, ValueError):
        most, period = (cgroup / "cpu.max").read_text().split()
        return int(most) / int(period)
    return None


def _gpus() -> int:
    """Counts the GPUs by their device files, without a driver's help: most machines have none."""
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(files) if shown is None else min(len(files), len([part for part in shown.split(",") if part]))
