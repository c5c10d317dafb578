"""Which cached pages of a pool give way first: one order over all its models."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvloom.kv.node import Node


class Keeper(Protocol):
    """A tree of cached pages."""

    @property
    def idle_blocks(self) -> int:
        """Blocks of pages that nobody but the tree holds."""

    def is_idle(self, node: Node) -> bool:
        """True where nobody but the tree holds the node's page."""

    def drop(self, node: Node) -> int:
        """Let go of the node and all below it; returns how many tokens that were."""


class Recency:
    """Nodes of all trees, least recently used first, each before its parent: the first is always a leaf."""

    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self._order: OrderedDict[Node, Keeper] = OrderedDict()

    @property
    def blocks(self) -> int:
        """Blocks that `reclaim` can give back."""
        return sum(keeper.idle_blocks for keeper in self.keepers)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._order)

    def enter(self, node: Node, keeper: Keeper) -> None:
        """A new leaf; `touch` its path next."""
        self._order[node] = keeper

    def leave(self, node: Node) -> None:
        del self._order[node]

    def touch(self, node: Node) -> None:
        """The path to `node` is used now."""
        for one in node.upwards():
            self._order.move_to_end(one)

    def reclaim(self, count: int) -> None:
        """Drop the least recently used pages that nobody uses, until `count` blocks are given back or there
        are no more. Pages in use that stand before them count as used now, lest they are looked at each time.

        A page in use may have a parent that is not, where a shipment uses it, or a sequence that has another
        page like the parent. It is dropped with that parent, and stays its users'.
        """
        left = max(self.blocks - count, 0)
        in_use: list[Node] = []
        while self.blocks > left:
            node, keeper = next(iter(self._order.items()))
            while not keeper.is_idle(node):
                self._order.move_to_end(node)
                in_use.append(node)
                node, keeper = next(iter(self._order.items()))
            keeper.drop(node)
        for node in in_use:
            if node in self._order and not node.children:
                self.touch(node)
