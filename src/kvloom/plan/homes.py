"""Which node each mesh is on."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.plan.cluster import MeshKind, Nodes


def homes(cluster: Sequence[Nodes], kinds: Sequence[MeshKind]) -> list[str]:
    """The node of each mesh of a group that the cluster can be cut into, `node-0` being the first. The
    largest first, each to the fullest node that has room: sizes divide each other, so nothing is wasted."""
    left = [(nodes, nodes.gpus) for nodes in cluster for _ in range(nodes.count)]
    names = [""] * len(kinds)
    for at in sorted(range(len(kinds)), key=lambda at: -kinds[at].gpus):
        kind = kinds[at]
        rooms = [
            (free, number)
            for number, (nodes, free) in enumerate(left)
            if nodes.mesh(kind.gpus) == kind and free >= kind.gpus
        ]
        free, number = min(rooms)
        left[number] = left[number][0], free - kind.gpus
        names[at] = f"node-{number}"
    return names
