"""A model's cached prefixes: a radix tree over token ids for each salt, one page a node."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import numpy as np

from kvloom.kv.page_keys import page_key, root_key
from kvloom.kv.pages import PageTable
from kvloom.kv.prefix_feed import PrefixFeed, covers, page_name, root_name
from kvloom.types.geometry import I32, I64
from kvloom.types.prefix_store import PageName

Run = tuple[int, ...]  # the token ids of one page


@dataclass(slots=True, eq=False)
class Node:
    """The page that holds `tokens` after all that its ancestors hold. A full page's run is as long as a page;
    a shorter one is a leaf. A root holds nothing: it has no tokens, the page -1 and no parent."""

    tokens: Run
    page: int
    parent: Node | None
    pins: int = 0
    """Pins whose path leads through here."""
    children: dict[Run, Node] = field(default_factory=dict)
    """The children by their tokens."""
    runs: list[Run] = field(default_factory=list)
    """Those tokens, sorted; none begins another."""
    name: bytes = b""
    """The name of a full page, or of a root, in the feed (`kv/prefix_feed.py`)."""
    key: bytes = b""
    """The key of a full page in a store, once it has been asked for, or of a root (`kv/page_keys.py`)."""

    def add(self, child: Node) -> None:
        self.children[child.tokens] = child
        insort(self.runs, child.tokens)

    def remove(self, child: Node) -> None:
        del self.children[child.tokens]
        del self.runs[bisect_left(self.runs, child.tokens)]

    def closest(self, run: Run) -> tuple[Node | None, int]:
        """Returns the child that has the most first tokens in common with `run`, and how many; None if none
        has any. Of all sorted runs, it is one of the two between which `run` would stand."""
        place = bisect_left(self.runs, run)
        near = self.runs[max(place - 1, 0) : place + 1]
        counts = [_common(one, run) for one in near]
        most = max(counts, default=0)
        return (self.children[near[counts.index(most)]], most) if most else (None, 0)

    def beginning_with(self, run: Run) -> list[Node]:
        """Returns the children whose tokens begin with `run`."""
        after = self.runs[bisect_left(self.runs, run) :]
        return [self.children[one] for one in takewhile(lambda one: one[: len(run)] == run, after)]

    def upwards(self) -> Iterator[Node]:
        """Yields this node and its ancestors, but not the root above them."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """Returns this node and all below it, each before its children."""
        found = [self]
        for node in found:  # grows while it is read
            found.extend(node.children.values())
        return found


class Root(Node):
    """The root of what is cached with one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: str, name: bytes, key: bytes) -> None:
        super().__init__((), -1, None, name=name, key=key)
        self.salt = salt


def _common(a: Run, b: Run) -> int:
    """Returns how many first tokens are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class Recency:
    """Nodes of all trees, least recently used first, each before its parent: the first is always a leaf."""

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks that `reclaim` can give back; the page tables count them."""
        self.feed = PrefixFeed()
        """Tells others which full pages all trees hold."""
        self.on_reclaim: Callable[[list[CachedPage]], None] = lambda _: None
        """Called with the full pages that `reclaim` has dropped, parents first, before their blocks are
        others'."""
        self._order: OrderedDict[Node, PrefixTree] = OrderedDict()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._order)

    def hottest(self) -> list[CachedPage]:
        """Returns the full pages, most recently used first, each after its parent."""
        return [CachedPage(tree, node) for node, tree in reversed(self._order.items()) if node.name]

    def enter(self, node: Node, tree: PrefixTree) -> None:
        """Adds a new leaf; `touch` its path next."""
        self._order[node] = tree

    def leave(self, node: Node) -> None:
        del self._order[node]

    def touch(self, node: Node) -> None:
        """Marks the path to `node` as used now."""
        for one in node.upwards():
            self._order.move_to_end(one)

    def reclaim(self, count: int) -> None:
        """Drops the least recently used pages that nobody uses, until `count` blocks are given back or there
        are no more. Pages in use that come before them count as used now, lest they are looked at each time.

        A page in use may have a parent that is not, if a transfer uses it, or a sequence that has another
        page like the parent. It is dropped with that parent, and stays its users'.
        """
        left = max(self.blocks - count, 0)
        in_use, gone, cut = list[Node](), list[CachedPage](), dict[PrefixTree, list[int]]()
        while self.blocks > left:
            node, tree = next(iter(self._order.items()))
            if tree.is_idle(node):
                if node.name:
                    gone.append(CachedPage(tree, node))
                cut.setdefault(tree, []).extend(tree.cut_off(node))
            else:
                self._order.move_to_end(node)
                in_use.append(node)
        for tree, pages in cut.items():
            tree.release(pages)
        for node in in_use:
            if node in self._order and not node.children:
                self.touch(node)
        if gone:
            self.on_reclaim(gone[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class CachedPage:
    """A full page of a tree, or one that the tree has just dropped."""

    tree: PrefixTree
    node: Node

    @property
    def is_here(self) -> bool:
        return self.tree.has(self.node)

    @property
    def blocks(self) -> I32:
        """Returns [layers, kv_heads]."""
        return self.tree.blocks_of(self.node)

    @property
    def name(self) -> PageName:
        """Returns the name by which a store knows the page. The keys that it takes are worked out once."""
        path = [*self.node.upwards()]
        parent = path[-1].parent
        assert parent is not None, "a node has a root above it"
        root = parent.key
        above = [parent, *reversed(path)]
        for before, node in pairwise(above):
            node.key = node.key or page_key(before.key, node.tokens)
        return PageName(self.tree.model, root, self.node.key)


TokenIds = Sequence[int] | I64


@dataclass(frozen=True, slots=True, eq=False)
class PinnedPath:
    """A pinned prefix: the first `tokens` tokens of what was asked for, up to the page of `end`."""

    end: Node
    tokens: int


class PrefixTree:
    """The cached prefixes of one model. The tree holds each of its pages once, and once more for each pin
    whose path leads through it.

    Each salt has a root of its own, and no page is below two roots: what is cached with one salt is never
    found with another, whoever asks. The empty salt is shared by all who have none.

    A page that nobody else holds is idle: it gives way when blocks are short, the least recently used first.
    """

    def __init__(self, pages: PageTable, recency: Recency, model: str) -> None:
        self.model = model
        self._pages = pages
        self.release = pages.release
        """Lets go of pages that have been cut off."""
        self._width = pages.geometry.tokens_per_block
        self._recency = recency
        self._roots: dict[str, Root] = {}  # by salt; a root without children is dropped
        self._nodes: dict[int, Node] = {}  # by page
        self._pinned = 0  # nodes with a pin

    # -- what the cache asks --------------------------------------------------------------------------

    def match(self, tokens: TokenIds, limit: int, salt: str = "") -> tuple[list[int], int]:
        """Returns the pages that hold the longest prefix of tokens[:limit] that is cached with `salt`, and
        its length; the last page may hold more than that. They count as used now."""
        path, length = self._walk(_plain(tokens), limit, salt)
        if path:
            self._recency.touch(path[-1])
        return [node.page for node in path], length

    def length(self, tokens: TokenIds, limit: int, salt: str = "") -> int:
        """Returns the length of that prefix, which does not count as used."""
        return self._walk(_plain(tokens), limit, salt)[1]

    def insert(self, tokens: TokenIds, pages: Sequence[int], salt: str = "") -> list[int]:
        """Caches `tokens`, which `pages` hold, with `salt`. Returns the pages that hold them here: others if
        they were cached with it before. Raises ValueError if the pages are too few or too many."""
        if len(pages) != -(-len(tokens) // self._width):
            raise ValueError(f"{len(pages)} pages cannot be those of {len(tokens)} tokens")
        if not pages:
            return []
        ids, found = _plain(tokens), list[int]()
        node: Node | None = self._roots.get(salt)
        if node is None:
            name, key = root_name(self.model, self._width, salt), root_key(self._width, salt)
            node = self._roots[salt] = Root(salt, name, key)
        for i, page in enumerate(pages):
            run = tuple(ids[i * self._width : (i + 1) * self._width])
            node = self._child(node, run, page)
            found.append(node.page)
        self._recency.touch(node)
        return found

    def give_up(self, page: int) -> None:
        """Lets go of a page, if it is cached, and of all below it: its user is about to write to it."""
        if page in self._nodes:
            self.release(self.cut_off(self._nodes[page]))

    def holders(self) -> dict[int, int]:
        """Returns how often the tree and its pins hold each page."""
        return {page: 1 + node.pins for page, node in self._nodes.items()}

    @property
    def pinned_blocks(self) -> int:
        """Blocks that no request can have before something is unpinned."""
        return self._pinned * self._pages.geometry.blocks_per_page

    # -- what the verbs ask ---------------------------------------------------------------------------

    def pin(self, tokens: TokenIds, salt: str = "") -> PinnedPath | None:
        """Keeps what is cached of `tokens` with `salt` until `unpin`, to be called once. Returns None if
        nothing is cached."""
        ids = _plain(tokens)
        path, length = self._walk(ids, len(ids), salt)
        if not path:
            return None
        pinned = PinnedPath(path[-1], length)
        self.pin_again(pinned)
        return pinned

    def pin_again(self, path: PinnedPath) -> None:
        """Undoes `unpin`, before anything could give way since."""
        self._recency.touch(path.end)
        for node in path.end.upwards():
            self._keep(node.page)
            self._pinned += node.pins == 0
            node.pins += 1

    def unpin(self, path: PinnedPath) -> None:
        for node in path.end.upwards():
            node.pins -= 1
            self._pinned -= node.pins == 0
            self._let_go(node.page)
        self._recency.touch(path.end)

    def evict(self, tokens: TokenIds, salt: str = "") -> int:
        """Drops what is cached of `tokens` with `salt` and what goes on from them, but for pages that are
        used, or lead to ones that are used or to other prefixes. Returns the number of tokens. Without tokens
        it drops all that is cached with the salt; see `_roots_of`."""
        ids = _plain(tokens)
        if not ids:
            return sum(self._prune(top) for root in self._roots_of(salt) for top in [*root.children.values()])
        root = self._roots.get(salt)
        if root is None:
            return 0
        path, length = self._walk(ids, len(ids), salt)
        full, tail = path[: length // self._width], path[length // self._width :]
        dropped = 0
        if length == len(ids):
            rest = tuple(ids[length - length % self._width :])
            last = full[-1] if full else root
            tops = last.beginning_with(rest) if rest else [last]
            dropped += sum(self._prune(top) for top in tops)
        elif tail and len(tail[0].tokens) == length % self._width:  # all of it belongs to `tokens`
            dropped += self._drop_idle_leaf(tail[0])
        for node in reversed(full):
            if self._nodes.get(node.page) is node:
                dropped += self._drop_idle_leaf(node)
        return dropped

    def pinned(self, tokens: TokenIds, salt: str = "") -> int:
        """Returns how many first tokens of `tokens` pins keep with `salt`; without tokens, how many they keep
        with the salt; see `_roots_of`."""
        ids = _plain(tokens)
        if ids:
            path, length = self._walk(ids, len(ids), salt)
            return min(length, sum(len(node.tokens) for node in path if node.pins))
        return sum(len(n.tokens) for root in self._roots_of(salt) for n in root.subtree() if n.pins)

    def _roots_of(self, salt: str) -> list[Node]:
        """Returns the roots of a salt; of all if it is empty, and of all salts of an adapter if it is that of
        its requests without one."""
        return [root for one, root in self._roots.items() if one == salt or covers(salt, one)]

    # -- what the pool asks ---------------------------------------------------------------------------

    def has(self, node: Node) -> bool:
        return self._nodes.get(node.page) is node

    def blocks_of(self, node: Node) -> I32:
        """Returns the blocks [layers, kv_heads] of the node's page."""
        blocks: I32 = self._pages.map[node.page]
        return blocks

    def is_idle(self, node: Node) -> bool:
        """Returns whether nobody but the tree holds the node's page."""
        return self._pages.refs[node.page] == 1

    def cut_off(self, node: Node) -> list[int]:
        """Takes the node, through which no pin leads, and all below it out of the tree. Returns their pages;
        `release` them next."""
        gone, parent = node.subtree(), node.parent
        assert parent is not None, "a root is dropped with its last child"
        assert not node.pins, "a pinned page stays"
        parent.remove(node)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.salt]
        for one in gone:
            self._recency.leave(one)
            if one.name:
                self._recency.feed.drop(one.name)
            del self._nodes[one.page]
        self._pages.uncache(pages := [one.page for one in gone])
        return pages

    # -- inside ---------------------------------------------------------------------------------------

    def _walk(self, tokens: Sequence[int], limit: int, salt: str) -> tuple[list[Node], int]:
        """Returns the nodes, from the child of the salt's root on, that hold the longest prefix of
        tokens[:limit] cached with it, and its length: full pages, and at the end perhaps one of which it
        takes a part."""
        path, limit = list[Node](), min(max(limit, 0), len(tokens))
        node: Node | None = self._roots.get(salt)
        if node is None:
            return path, 0
        while True:
            at = len(path) * self._width
            run = tuple(tokens[at : min(at + self._width, limit)])
            child = node.children.get(run)
            if child is None or len(run) < self._width:
                break
            path.append(child)
            node = child
        near, common = node.closest(run)
        if near is not None:
            path.append(near)
        return path, at + common

    def _child(self, parent: Node, run: Run, page: int) -> Node:
        """Returns the child that holds `run`: as it was, grown from one that held its beginning, or new."""
        if run in parent.children:
            return parent.children[run]
        near, common = parent.closest(run)
        if near is not None and common == len(run):
            return near
        if near is not None and common == len(near.tokens):
            self._grow(near, run, page)
            return near
        child = Node(run, page, parent)
        self._pages.cache(page)
        parent.add(child)
        self._nodes[page] = child
        self._recency.enter(child, self)
        self._name(child)
        return child

    def _name(self, node: Node) -> None:
        """Names a node's page once it is full, and tells of it."""
        if len(node.tokens) == self._width and not node.name and node.parent is not None:
            node.name = page_name(node.parent.name, node.tokens)
            self._recency.feed.insert(node.name)

    def _grow(self, node: Node, run: Run, page: int) -> None:
        """Replaces the page of a tail by `page`, which holds what it holds and more. Its pins go over."""
        assert node.parent is not None
        if page != node.page:
            self._pages.cache(page)
            for _ in range(node.pins):
                self._keep(page)
                self._let_go(node.page)
            self._pages.uncache([node.page])
            self._pages.release([node.page])
            del self._nodes[node.page]
            self._nodes[page] = node
        node.parent.remove(node)
        node.tokens, node.page = run, page
        node.parent.add(node)
        self._name(node)

    def _keep(self, page: int) -> None:
        """Keeps a page for one pin."""
        self._pages.retain([page])
        self._pages.promise([page])

    def _let_go(self, page: int) -> None:
        self._pages.unpromise([page])
        self._pages.release([page])

    def _prune(self, top: Node) -> int:
        """Drops what is idle at and below `top` and leads to nothing that stays."""
        return sum(self._drop_idle_leaf(node) for node in reversed(top.subtree()))

    def _drop_idle_leaf(self, node: Node) -> int:
        if gone := not node.children and self.is_idle(node):
            self.release(self.cut_off(node))
        return len(node.tokens) * gone


def _plain(tokens: TokenIds) -> Sequence[int]:
    """Returns Python's own numbers, which are kept for long and compared often."""
    if isinstance(tokens, np.ndarray):
        plain: list[int] = tokens.tolist()
        return plain
    return tokens
