"""An index of contexts: which units probably hold which, going by what was sent where."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

CHUNK: Final = 16  # tokens that are told apart
MOST_CHUNKS: Final = 1 << 16  # remembered of one unit


class PrefixIndex:
    """A trie of chunks of tokens for each unit, bounded like the unit's own cache: one trie for all its
    models, of which the least recently used chunks go first.

    A node is named by a hash over the model, the salt and all chunks from the root to it. Nodes are used
    from the leaf to the root, so that the oldest of a unit is always a leaf.
    """

    def __init__(self, most_chunks: int = MOST_CHUNKS) -> None:
        self._most = most_chunks
        self._units: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Returns the number of chunks remembered, over all units."""
        return sum(len(nodes) for nodes in self._units.values())

    def note(self, model: str, tokens: Sequence[int], unit: str, salt: str = "") -> None:
        """Remembers that `unit` holds these tokens with the salt now, or soon."""
        nodes = self._units.setdefault(unit, OrderedDict())
        for node in reversed(_path(model, salt, tokens)):
            nodes[node] = None
            nodes.move_to_end(node)
        while len(nodes) > self._most:
            nodes.popitem(last=False)

    def match(self, model: str, tokens: Sequence[int], salt: str = "") -> dict[str, int]:
        """Returns, for each unit that holds some of these tokens with the salt, how many, from the first on,
        in whole chunks."""
        path = _path(model, salt, tokens)
        depths = {unit: _depth(path, nodes) for unit, nodes in self._units.items()}
        return {unit: depth * CHUNK for unit, depth in depths.items() if depth}

    def forget(self, unit: str) -> None:
        self._units.pop(unit, None)


def _path(model: str, salt: str, tokens: Sequence[int]) -> list[int]:
    """Returns the nodes of the whole chunks of `tokens`, root first. The root is the model with the salt."""
    chunks = array("i", tokens).tobytes()
    size = CHUNK * array("i").itemsize
    path, node = [], hash((model, salt))
    for end in range(size, len(chunks) + 1, size):
        node = hash((node, chunks[end - size : end]))
        path.append(node)
    return path


def _depth(path: list[int], nodes: OrderedDict[int, None]) -> int:
    return next((depth for depth, node in enumerate(path) if node not in nodes), len(path))
