"""The devices there are, and the groups of them that can work as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvloom.cost.shape import ModelShape
from kvloom.cost.work import CostModel

CPU: Final = "cpu"  # its `gpus` are cores: they share one memory, and split no head
_TENTHS: Final = tuple(tenth / 10 for tenth in range(3, 11))  # MuxServe profiles 30 % to 100 % of the SMs

Costs = Callable[[str, int, Mapping[str, ModelShape]], CostModel]
"""The cost model of so many devices of a name that work as one, with these models on them."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """`count` like machines with `gpus` devices each. memory: bytes of one device."""

    device: str
    memory: int
    gpus: int
    count: int

    @property
    def total(self) -> int:
        return self.gpus * self.count

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the meshes that a node is cut into, largest first: the whole of it, and powers of two."""
        powers = {1 << bit for bit in range(self.gpus.bit_length())}
        return tuple(sorted(powers | {self.gpus}, reverse=True))

    def mesh(self, gpus: int) -> MeshKind:
        return MeshKind(self.device, self.memory, gpus)


class MeshKind(NamedTuple):
    """`gpus` devices of one node that work as one, by tensor parallelism. memory: bytes of each."""

    device: str
    memory: int
    gpus: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Parts of the compute that a job may have, ascending."""
        if self.device == CPU:
            return tuple(core / self.gpus for core in range(1, self.gpus + 1))
        return _TENTHS

    @property
    def bytes(self) -> int:
        return self.gpus * self.memory

    def splits(self, shape: ModelShape) -> bool:
        """Whether every device gets as many heads as the others."""
        return self.device == CPU or shape.heads % self.gpus == 0

    def __str__(self) -> str:
        return f"{self.gpus} × {self.device}"


def mesh_kinds(cluster: Sequence[Nodes]) -> tuple[MeshKind, ...]:
    """All that the cluster can be cut into, smallest first."""
    kinds = {nodes.mesh(size) for nodes in cluster for size in nodes.sizes}
    return tuple(sorted(kinds, key=lambda kind: (kind.bytes, kind.gpus, kind.device)))
