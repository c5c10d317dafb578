"""One cached page in a prefix tree."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

Run = tuple[int, ...]  # the token ids of one page


@dataclass(slots=True, eq=False)
class Node:
    """The page that holds `tokens` after all that its ancestors hold. A full page's run is as long as a page;
    a shorter one is a leaf. The root holds nothing: no tokens, page -1, no parent.

    children: by their tokens. runs: those tokens, sorted; none begins another. pins: of paths through here.
    """

    tokens: Run
    page: int
    parent: Node | None
    pins: int = 0
    children: dict[Run, Node] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def add(self, child: Node) -> None:
        self.children[child.tokens] = child
        insort(self.runs, child.tokens)

    def remove(self, child: Node) -> None:
        del self.children[child.tokens]
        del self.runs[bisect_left(self.runs, child.tokens)]

    def closest(self, run: Run) -> tuple[Node | None, int]:
        """The child that has the most first tokens in common with `run`, and how many; None for none. Of all
        sorted runs, it is one of the two between which `run` would stand."""
        place = bisect_left(self.runs, run)
        near = self.runs[max(place - 1, 0) : place + 1]
        counts = [_common(one, run) for one in near]
        most = max(counts, default=0)
        return (self.children[near[counts.index(most)]], most) if most else (None, 0)

    def beginning_with(self, run: Run) -> list[Node]:
        """The children whose tokens begin with `run`."""
        first = bisect_left(self.runs, run)
        last = first
        while last < len(self.runs) and self.runs[last][: len(run)] == run:
            last += 1
        return [self.children[one] for one in self.runs[first:last]]

    def upwards(self) -> Iterator[Node]:
        """This node and its ancestors, but not the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """This node and all below it, each before its children."""
        found = [self]
        for node in found:  # grows while it is read
            found.extend(node.children.values())
        return found


def _common(a: Run, b: Run) -> int:
    """How many first tokens are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
