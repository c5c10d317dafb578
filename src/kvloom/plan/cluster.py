"""The devices of a cluster, the groups of them that can work as one, and what work costs there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel
from kvloom.types.errors import ConfigError
from kvloom.types.spec import BY_NAME, Slo, UnitAbilities, unit_abilities

CPU: Final = "cpu"  # its `gpus` are cores: they share one memory, and split no head
_TENTHS: Final = tuple(tenth / 10 for tenth in range(3, 11))  # MuxServe profiles 30 % to 100 % of the SMs

Costs = Callable[[str, int, Mapping[str, ModelShape]], CostModel]
"""The cost model of so many devices of a name that work as one, with these models on them."""
Abilities = Callable[[str, int], UnitAbilities]
"""The abilities of a unit on such a device, by its ranks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand for a model: `rate` requests a second of `prompt` tokens, answered with `output` tokens,
    both means."""

    name: str
    shape: ModelShape
    rate: float
    prompt: float
    output: float
    path: str | None = None
    slo: Slo | None = None
    speculation: str = "none"
    """The drafter of tokens, as in `ModelSpec`."""
    acceptance: float = 0.0
    """The probability that a drafted token is right if those before it are."""

    @property
    def draft(self) -> str | None:
        """The model that drafts for this one; None if none does."""
        return None if self.speculation in BY_NAME else self.speculation

    @property
    def flops(self) -> float:
        """Returns the operations of one request: two for each weight and token, and attention's four for each
        pair and number of a head."""
        tokens = self.prompt + self.output
        shape = self.shape
        layer = shape.attention_parameters + shape.active * shape.expert_parameters
        dense = 2.0 * (shape.layers * layer + shape.vocab * shape.hidden) * tokens
        return dense + 2.0 * shape.layers * shape.heads * shape.head_dim * tokens * tokens

    @property
    def compute(self) -> float:
        """Returns rate × scale of the model, in FLOP a second: algorithm 1 places models in the order of this
        number."""
        return self.rate * self.flops


@dataclass(frozen=True, slots=True)
class Nodes:
    """A number of like machines with `gpus` devices each."""

    device: str
    memory: int
    """The bytes of one device."""
    gpus: int
    count: int
    names: tuple[str, ...] = ()
    """The name of each machine; empty if they have none."""
    abilities: Abilities = unit_abilities
    budget: int = 0
    """The bytes for each device that weights and pool have together, if weights sleep; 0 if they stay."""

    @property
    def total(self) -> int:
        return self.gpus * self.count

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the meshes that a node is cut into, largest first: the whole of it, and powers
        of two."""
        powers = {1 << bit for bit in range(self.gpus.bit_length())}
        return tuple(sorted(powers | {self.gpus}, reverse=True))

    def mesh(self, gpus: int) -> MeshKind:
        abilities = self.abilities(self.device, ranks_of(self.device, gpus))
        return MeshKind(self.device, self.memory, gpus, abilities, self.budget)


def ranks_of(device: str, gpus: int) -> int:
    """Returns the ranks of a unit on so many devices: one for each GPU, and one for all cores."""
    return 1 if device == CPU else gpus


class MeshKind(NamedTuple):
    """A mesh of `gpus` devices of one node that work as one, by tensor parallelism."""

    device: str
    memory: int
    """The bytes of each device."""
    gpus: int
    abilities: UnitAbilities
    """The abilities of a unit on it."""
    budget: int = 0
    """The bytes for each device that weights and pool have together, if weights sleep; 0 if they stay."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The parts of the compute that a job may have, ascending."""
        if not self.abilities.shares:
            return (1.0,)
        if self.device == CPU:
            return tuple(core / self.gpus for core in range(1, self.gpus + 1))
        return _TENTHS

    @property
    def bytes(self) -> int:
        return self.gpus * self.memory

    def splits(self, shape: ModelShape) -> bool:
        """Returns whether every device gets as many heads, and as many KV heads, as the others."""
        ranks = ranks_of(self.device, self.gpus)
        return shape.heads % ranks == 0 and shape.kv_heads % ranks == 0

    def __str__(self) -> str:
        return f"{self.gpus} × {self.device}"


def mesh_kinds(cluster: Sequence[Nodes]) -> tuple[MeshKind, ...]:
    """Returns all meshes that the cluster can be cut into, smallest first."""
    kinds = {nodes.mesh(size) for nodes in cluster for size in nodes.sizes}
    return tuple(sorted(kinds, key=lambda kind: (kind.bytes, kind.gpus, kind.device)))


class DeviceCosts:
    """The costs of work on each device: by the device's sheet, and for cores by a profile."""

    def __init__(self, nodes: Sequence[Nodes], demands: Sequence[Demand], profile: Profile | None) -> None:
        """Raises ConfigError if cores are to be used whose costs were not measured."""
        self._profile = profile
        if all(one.device != CPU for one in nodes):
            return
        if profile is None:
            raise ConfigError("--profile: is missing; for device cpu what `kvloom profile` wrote is right")
        for demand in demands:
            if demand.name not in profile.shapes:
                raise ConfigError(
                    f"--profile: model {demand.name!r} was not measured; {', '.join(profile.shapes)} were"
                )
        largest = max(one.gpus for one in nodes if one.device == CPU)
        if largest > profile.cores:
            raise ConfigError(
                f"--profile: was measured on {profile.cores} cores, nodes have {largest}; one of a machine "
                "like them is right"
            )

    def __call__(self, device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        if device == CPU:
            assert self._profile is not None
            return ProfiledCostModel(self._profile, gpus)
        return Roofline(find_device(device), gpus, shapes)


Cut = tuple[tuple[int, int], ...]
"""The cut of all nodes of a kind: (devices of a mesh, how many such meshes), the largest mesh first."""
Group = tuple[Cut, ...]
"""A cut for each kind of nodes."""


def cuts(nodes: Nodes, sizes: Collection[int]) -> Iterator[Cut]:
    """Returns all cuts into meshes of these sizes that leave no device idle if it could be in such a mesh."""
    useful = [size for size in nodes.sizes if size in sizes]
    odd = nodes.gpus & (nodes.gpus - 1) and nodes.gpus in useful
    powers = [size for size in useful if not (odd and size == nodes.gpus)]
    for whole in range(nodes.count + 1 if odd else 1):
        if odd and not powers and whole < nodes.count:
            continue
        for rest in _divide(nodes.gpus, nodes.count - whole, powers, {}):
            yield ((nodes.gpus, whole), *rest) if whole else rest


def _divide(gpus: int, count: int, sizes: Sequence[int], taken: dict[int, int]) -> Iterator[Cut]:
    """Cuts nodes into meshes. Sizes are powers of two, so that the larger meshes never keep the smaller from
    fitting."""
    if not sizes:
        yield tuple((size, number) for size, number in taken.items() if number)
        return
    size = sizes[0]
    slots = count * (gpus // size) - sum(number * (larger // size) for larger, number in taken.items())
    for number in range(slots, -1 if len(sizes) > 1 else slots - 1, -1):
        yield from _divide(gpus, count, sizes[1:], {**taken, size: number})


def fits(nodes: Nodes, cut: Cut) -> bool:
    """Returns whether the nodes can be cut so."""
    count = nodes.count
    odd = nodes.gpus & (nodes.gpus - 1)
    powers = []
    for size, number in cut:
        if odd and size == nodes.gpus:
            count -= number
        else:
            powers.append((size, number))
    taken = 0  # devices, in meshes as large or larger
    for size, number in powers:
        taken += size * number
        if taken > count * (nodes.gpus // size) * size:
            return False
    return count >= 0


def groups(cluster: Sequence[Nodes], useful: Collection[MeshKind], most: int) -> list[Group] | None:
    """Returns all groups of meshes; None if a kind of nodes, or all together, have more than `most`."""
    every: list[list[Cut]] = []
    total = 1
    for nodes in cluster:
        sizes = [size for size in nodes.sizes if nodes.mesh(size) in useful]
        some = []
        for cut in cuts(nodes, sizes):
            some.append(cut)
            if total * len(some) > most:
                return None
        every.append(some)
        total *= len(some)
    return list(product(*every))


def meshes(cluster: Sequence[Nodes], group: Group) -> list[MeshKind]:
    """Returns the group's meshes, one by one."""
    return [
        nodes.mesh(size)
        for nodes, cut in zip(cluster, group, strict=True)
        for size, number in cut
        for _ in range(number)
    ]


def worthwhile(found: Sequence[Group], most: int, needed: int) -> list[Group]:
    """Returns the groups without those that have more than `most` meshes, as long as others have fewer, and
    without those whose largest mesh has fewer than `needed` devices, if others have such a mesh."""
    sized = [group for group in found if max((n for cut in group for n, _ in cut), default=0) >= needed]
    sized = sized or list(found)
    counts = [sum(number for cut in group for _, number in cut) for group in sized]
    most = max(most, min(counts, default=0))
    return [group for group, count in zip(sized, counts, strict=True) if count <= most]


def each_node(cluster: Sequence[Nodes]) -> list[Nodes]:
    """Returns every node by itself; its number is its place."""
    return [nodes for nodes in cluster for _ in range(nodes.count)]


def fullest(nodes: Sequence[Nodes], free: Sequence[int], kind: MeshKind) -> int | None:
    """Returns the number of the fullest node that has room for such a mesh; None if none has.

    `free` is the number of free devices of each node."""
    rooms = [
        (free[n], n) for n, one in enumerate(nodes) if one.mesh(kind.gpus) == kind and free[n] >= kind.gpus
    ]
    return min(rooms)[1] if rooms else None


class Home(NamedTuple):
    """The place of a mesh."""

    node: str
    """The node's name; empty if any will do, because there is but one and it has no name."""
    first: int
    """The number of the mesh's first device there; those after it are its other ones. 0 for cores."""


def node_names(cluster: Sequence[Nodes]) -> list[str]:
    """Returns the name of every node: its own, or `node-N`, where N is its place among all. A single node
    without one stays without."""
    given = [name for nodes in cluster for name in nodes.names or [""] * nodes.count]
    return given if len(given) == 1 else [name or f"node-{n}" for n, name in enumerate(given)]


def homes(cluster: Sequence[Nodes], kinds: Sequence[MeshKind]) -> list[Home]:
    """Returns the place of each mesh of a group that the cluster can be cut into. The largest goes first,
    each to the fullest node that has room: sizes divide each other, so nothing is wasted."""
    nodes, names = each_node(cluster), node_names(cluster)
    free = [one.gpus for one in nodes]
    found = [Home("", 0)] * len(kinds)
    for at in sorted(range(len(kinds)), key=lambda at: -kinds[at].gpus):
        number = fullest(nodes, free, kinds[at])
        assert number is not None
        first = 0 if kinds[at].device == CPU else nodes[number].gpus - free[number]
        free[number] -= kinds[at].gpus
        found[at] = Home(names[number], first)
    return found
