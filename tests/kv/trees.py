"""A prefix tree as tests look at it: whole, and without its own search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.kv.prefix import Node, PrefixTree


def nodes(tree: PrefixTree) -> Iterator[tuple[tuple[int, ...], Node]]:
    """All nodes but the root, each with the tokens from the root to its end; parents first."""
    todo: list[tuple[tuple[int, ...], Node]] = [((), tree._root)]
    while todo:
        tokens, node = todo.pop()
        if node.parent is not None:
            yield tokens, node
        todo += [((*tokens, *child.tokens), child) for child in node.children.values()]


def longest(tree: PrefixTree, tokens: Sequence[int]) -> int:
    """How many first tokens of `tokens` are cached."""
    most = 0
    for path, _ in nodes(tree):
        common = 0
        while common < min(len(path), len(tokens)) and path[common] == tokens[common]:
            common += 1
        most = max(most, common)
    return most


def cached_tokens(tree: PrefixTree) -> int:
    return sum(len(node.tokens) for _, node in nodes(tree))


def check_form(pool: Pool) -> None:
    """What holds of every tree, and of the order of use."""
    place = {node: i for i, node in enumerate(pool._recency.nodes)}
    for cache in pool.caches.values():
        _check_tree(cache, place)


def _check_tree(cache: ModelCache, place: dict[Node, int]) -> None:
    width = cache.geometry.tokens_per_block
    roots = [cache.prefixes._root]
    for node in [*roots, *(node for _, node in nodes(cache.prefixes))]:
        runs = sorted(node.children)
        assert node.runs == runs
        assert all(child.tokens == run and child.parent is node for run, child in node.children.items())
        assert all(after[: len(before)] != before for before, after in pairwise(runs)), "one begins the next"
        assert all(1 <= len(run) <= width for run in runs)
        assert len(node.tokens) == width or not node.children or node.parent is None, "a tail is a leaf"
        assert node.pins >= sum(child.pins for child in node.children.values()) or node.parent is None
        if node.parent is not None:
            assert all(place[child] < place[node] for child in node.children.values()), "leaves go first"
