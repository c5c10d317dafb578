"""A small pool of two models, prompts that leave what they computed, and
prefix trees as tests look at them: whole, and without their own search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.kv.prefix import Node, PrefixTree
from kvloom.types.geometry import Geometry

PAGE = Geometry(layers=2, kv_heads=1, head_dim=8, itemsize=4, block_bytes=256)  # 4 tokens, 2 blocks a page
THICK = Geometry(layers=3, kv_heads=2, head_dim=16, itemsize=4, block_bytes=256)  # 2 tokens, 6 blocks a page

ids = itertools.count(1000)


def make(blocks: int = 400) -> Pool:
    return Pool(blocks, {"m": PAGE, "t": THICK}, max_sequences=6, max_tokens={"m": 200, "t": 200})


def serve(cache: ModelCache, tokens: list[int], *, tail: bool = True, salt: str = "") -> int:
    """Compute `tokens`, as far as they are not cached, and leave them cached. Returns what was cached."""
    sequence = next(ids)
    found = cache.adopt(sequence, tokens, len(tokens), salt=salt)
    if found < len(tokens):
        cache.end_forward(cache.begin_forward([sequence], [len(tokens) - found]))
    cache.keep(sequence, tokens, tail=tail)
    cache.remove_sequence(sequence)
    return found


def found(cache: ModelCache, tokens: list[int], salt: str = "") -> int:
    """What would be adopted; counts as use."""
    return cache.prefixes.match(tokens, len(tokens), salt)[1]


def salts(tree: PrefixTree) -> list[str]:
    """The salts with which anything is cached."""
    return list(tree._roots)


def nodes(tree: PrefixTree, salt: str | None = None) -> Iterator[tuple[tuple[int, ...], Node]]:
    """All nodes but the roots, each with the tokens from the root to its end; parents first. Of one salt, or
    of all."""
    roots = tree._roots.values() if salt is None else [tree._roots[salt]] if salt in tree._roots else []
    todo: list[tuple[tuple[int, ...], Node]] = [((), root) for root in roots]
    while todo:
        tokens, node = todo.pop()
        if node.parent is not None:
            yield tokens, node
        todo += [((*tokens, *child.tokens), child) for child in node.children.values()]


def longest(tree: PrefixTree, tokens: Sequence[int], salt: str = "") -> int:
    """How many first tokens of `tokens` are cached with the salt."""
    most = 0
    for path, _ in nodes(tree, salt):
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
    roots = list(cache.prefixes._roots.values())
    assert all(root.children for root in roots), "a salt of which nothing is cached is forgotten"
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
