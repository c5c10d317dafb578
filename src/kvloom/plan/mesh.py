"""How a cluster can be cut into meshes (MuxServe, section 3.2).

A mesh lies within a node. Where the nodes of a kind are alike, only the number of meshes of each size counts,
not which node is cut how: four nodes of eight devices have 715 combinations of ten patterns, but 165 counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from kvloom.plan.cluster import MeshKind, Nodes

Cut = tuple[tuple[int, int], ...]
"""(devices of a mesh, how many such meshes), largest first: what becomes of all nodes of a kind."""
Group = tuple[Cut, ...]
"""A cut for each kind of nodes."""


def cuts(nodes: Nodes, sizes: Collection[int]) -> Iterator[Cut]:
    """All cuts into meshes of these sizes that leave no device idle which such a mesh could have."""
    useful = [size for size in nodes.sizes if size in sizes]
    odd = nodes.gpus & (nodes.gpus - 1) and nodes.gpus in useful
    powers = [size for size in useful if not (odd and size == nodes.gpus)]
    for whole in range(nodes.count + 1 if odd else 1):
        if odd and not powers and whole < nodes.count:
            continue
        for rest in _divide(nodes.gpus, nodes.count - whole, powers, {}):
            yield ((nodes.gpus, whole), *rest) if whole else rest


def _divide(gpus: int, count: int, sizes: Sequence[int], taken: dict[int, int]) -> Iterator[Cut]:
    """Sizes are powers of two, so that the larger meshes never keep the smaller from fitting."""
    if not sizes:
        yield tuple((size, number) for size, number in taken.items() if number)
        return
    size = sizes[0]
    slots = count * (gpus // size) - sum(number * (larger // size) for larger, number in taken.items())
    for number in range(slots, -1 if len(sizes) > 1 else slots - 1, -1):
        yield from _divide(gpus, count, sizes[1:], {**taken, size: number})


def fits(nodes: Nodes, cut: Cut) -> bool:
    """Whether the nodes can be cut so."""
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
    """All groups of meshes; None where a kind of nodes, or all together, have more than `most`."""
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
    """The group's meshes, one by one."""
    return [
        nodes.mesh(size)
        for nodes, cut in zip(cluster, group, strict=True)
        for size, number in cut
        for _ in range(number)
    ]


def worthwhile(found: Sequence[Group], most: int, needed: int) -> list[Group]:
    """Without those that have more than `most` meshes, as long as others have fewer, and those whose largest
    mesh has fewer than `needed` devices, where others have it."""
    sized = [group for group in found if max((n for cut in group for n, _ in cut), default=0) >= needed]
    sized = sized or list(found)
    counts = [sum(number for cut in group for _, number in cut) for group in sized]
    most = max(most, min(counts, default=0))
    return [group for group, count in zip(sized, counts, strict=True) if count <= most]
