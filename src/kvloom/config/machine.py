"""The cores, the memory and the GPUs that a fleet on this machine may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.kv.memory import CGROUP, available_memory

OWN_CGROUP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that a machine has for a fleet."""

    cores: int
    """The cores that this process may use."""
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
    quota: float | None = None
    """The cores whose time a container's limit allows; None if there is no limit."""

    @classmethod
    def together(cls, machines: Sequence[Machine]) -> Machine:
        """Returns what the nodes of a cluster have in all."""
        return cls(
            cores=sum(one.cores for one in machines),
            memory=sum(one.memory for one in machines),
            gpus=sum(one.gpus for one in machines),
            nodes=tuple(one.name for one in machines),
            quota=sum(one.auto_cores for one in machines),
            least=cls(
                cores=min((one.cores for one in machines), default=0),
                memory=min((one.memory for one in machines), default=0),
                gpus=min((one.gpus for one in machines), default=0),
                quota=min((one.auto_cores for one in machines), default=0),
            ),
        )

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory=available_memory(),
            gpus=_gpus(),
            name=platform.node(),
            quota=cpu_quota(),
        )

    @property
    def auto_cores(self) -> int:
        """The cores that `threads: auto` takes: no more than have time, because further threads would only
        take turns with these. The quota is rounded down, but to 1 at least."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


def cpu_quota(root: Path = CGROUP, own: Path = OWN_CGROUP) -> float | None:
    """Returns the cores whose time the cgroups (version 2) that this process is in allow it, of which the
    smallest limit counts; None if none sets a limit. own: the file that names its cgroup."""
    quotas = list[float]()
    with suppress(OSError):
        lines = own.read_text().splitlines()
        folder = root / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
        for one in (folder, *folder.parents):
            if not one.is_relative_to(root):
                break
            with suppress(OSError, ValueError):
                most, period = (one / "cpu.max").read_text().split()
                quotas.append(int(most) / int(period))
    return min(quotas, default=None)


def _gpus() -> int:
    """Counts the GPUs by their device files, without a driver's help: most machines have none."""
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(files) if shown is None else min(len(files), len([part for part in shown.split(",") if part]))
