"""The router's index of contexts: which units hold which prefixes, going by what was sent there and by what
they tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvloom.kv.prefix_feed import page_name, root_name, split_names
from kvloom.types.verbs import CacheChanges

CHUNK: Final = 16  # tokens of a page, if a unit does not say how many it keeps in one
MOST_PAGES: Final = 1 << 18  # remembered, over all units
MOST_NOTES: Final = 1 << 16  # pages remembered of one unit, of which it has not told
ROUNDS: Final = 120  # answers of a unit, after which a note is forgotten that it has not confirmed
_PATHS: Final = 32  # prompts of which the names are kept, while several questions are asked about one


class _Page:
    """A node of the tree: the page that holds its tokens after all that lie before."""

    __slots__ = ("noted", "told")

    def __init__(self) -> None:
        self.noted = 0
        """A bit for each unit to which the page was sent."""
        self.told = 0
        """A bit for each unit that has told that it holds the page."""


class _Path:
    """The names of a prompt's whole pages, made as far as somebody has asked."""

    def __init__(self, root: bytes, tokens: Sequence[int], width: int) -> None:
        self.tokens = tokens
        self.names: list[bytes] = []
        self._last = root
        self._width = width

    def upto(self, count: int, made: Callable[[], None]) -> Iterator[bytes]:
        """Yields the names of the first `count` pages. made: called for each that is made now."""
        for at in range(count):
            if at == len(self.names):
                run = self.tokens[at * self._width : (at + 1) * self._width]
                self._last = page_name(self._last, run)
                self.names.append(self._last)
                made()
            yield self.names[at]


class PrefixIndex:
    """A radix tree over the pages of prompts for each model and salt, with the units that hold each page.

    A node is found by its page's name, a digest over all tokens from the root to the page's end
    (`kv/prefix_feed.py`), so one table holds all trees, and a unit's feed needs to name no path. It is
    bounded: the least recently used pages go first, each before those it hangs on.

    A unit that was sent a prompt is taken to hold it (`note`). If the unit tells what it holds (`apply`), a
    note that is not confirmed is forgotten after ROUNDS answers.
    """

    def __init__(self, most_pages: int = MOST_PAGES, most_notes: int = MOST_NOTES) -> None:
        self.operations = 0
        """Names made and pages looked up so far: what the index has cost."""
        self._most_pages = most_pages
        self._most_notes = most_notes
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._bits: dict[str, int] = {}  # of the units that anything is known of
        self._notes: dict[str, OrderedDict[bytes, int]] = {}  # by unit, each with the round that forgets it
        self._rounds: dict[str, int] = {}  # answers of the units that tell what they hold
        self._paths: OrderedDict[tuple[int, bytes], _Path] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of pages remembered."""
        return len(self._pages)

    # -- what is asked ----------------------------------------------------------------------------------

    def match(
        self, model: str, tokens: Sequence[int], salt: str = "", *, width: int = CHUNK
    ) -> dict[str, int]:
        """Returns, for each unit that holds some of these tokens with the salt, how many, from the first on,
        in whole pages of `width` tokens."""
        path, found = self._path(model, tokens, salt, width), dict[str, int]()
        holding, depth = -1, 0
        for name in path.upto(len(tokens) // width, self._count):
            self.operations += 1
            page = self._pages.get(name)
            still = holding & (page.noted | page.told) if page else 0
            if still != holding:
                self._set(found, holding & ~still, depth * width)
                holding = still
                if not holding:
                    return found
            depth += 1
        self._set(found, holding, depth * width)
        return found

    def names(self, model: str, tokens: Sequence[int], salt: str = "", *, width: int = CHUNK) -> list[bytes]:
        """Returns the names of the prompt's whole pages."""
        return list(self._path(model, tokens, salt, width).upto(len(tokens) // width, self._count))

    def note(
        self,
        model: str,
        tokens: Sequence[int],
        unit: str,
        salt: str = "",
        *,
        end: int | None = None,
        width: int = CHUNK,
    ) -> None:
        """Remembers that `unit` holds tokens[:end] with the salt now, or soon."""
        bit, notes = self._bit(unit), self._notes.setdefault(unit, OrderedDict())
        until = self._rounds.get(unit, 0) + ROUNDS
        path = self._path(model, tokens, salt, width)
        pages = (len(tokens) if end is None else end) // width
        for name in reversed(list(path.upto(pages, self._count))):
            self.operations += 1
            self._page(name).noted |= bit
            notes[name] = until
            notes.move_to_end(name)
        while len(notes) > self._most_notes:
            self._unnote(notes.popitem(last=False)[0], bit)
        self._shrink()

    # -- what units tell --------------------------------------------------------------------------------

    def apply(self, unit: str, changes: CacheChanges) -> None:
        """Takes in what a unit tells of the pages that it holds."""
        bit, notes = self._bit(unit), self._notes.setdefault(unit, OrderedDict())
        if changes.whole:
            self._clear((name for name, page in self._pages.items() if page.told & bit), bit)
        for name in reversed(list(split_names(changes.come))):
            self._page(name).told |= bit
        for name in split_names(changes.gone):
            if name in self._pages:
                self._pages[name].told &= ~bit
                notes.pop(name, None)
                self._unnote(name, bit)
        now = self._rounds[unit] = self._rounds.get(unit, 0) + 1
        while notes and next(iter(notes.values())) <= now:
            self._unnote(notes.popitem(last=False)[0], bit)
        self._shrink()

    def drop(
        self,
        model: str,
        tokens: Sequence[int],
        unit: str,
        salt: str = "",
        *,
        end: int | None = None,
        width: int = CHUNK,
    ) -> None:
        """Forgets that the unit was sent tokens[:end], because it was asked to drop them. What it has told
        stays until it tells otherwise."""
        bit, notes = self._bit(unit), self._notes.get(unit, OrderedDict())
        pages = (len(tokens) if end is None else end) // width
        for name in self._path(model, tokens, salt, width).upto(pages, self._count):
            if notes.pop(name, None) is not None:
                self._unnote(name, bit)

    def forget(self, unit: str) -> None:
        """Forgets all that the unit holds."""
        bit = self._bits.pop(unit, 0)
        self._notes.pop(unit, None)
        self._rounds.pop(unit, None)
        if bit:
            held = (name for name, page in self._pages.items() if (page.noted | page.told) & bit)
            for name in list(held):
                self._pages[name].noted &= ~bit
                self._pages[name].told &= ~bit
                self._leave(name)

    # -- inside -----------------------------------------------------------------------------------------

    def _count(self) -> None:
        self.operations += 1

    def _bit(self, unit: str) -> int:
        """Returns the unit's bit: the lowest that no other unit has."""
        bit = self._bits.get(unit)
        if bit is None:
            taken = sum(self._bits.values())
            bit = self._bits[unit] = ~taken & (taken + 1)
        return bit

    def _set(self, found: dict[str, int], units: int, tokens: int) -> None:
        """Sets the tokens that the units of these bits hold."""
        if tokens:
            found.update((unit, tokens) for unit, bit in self._bits.items() if units & bit)

    def _page(self, name: bytes) -> _Page:
        page = self._pages.get(name)
        if page is None:
            page = self._pages[name] = _Page()
        else:
            self._pages.move_to_end(name)
        return page

    def _clear(self, names: Iterable[bytes], bit: int) -> None:
        for name in list(names):
            self._pages[name].told &= ~bit
            self._leave(name)

    def _unnote(self, name: bytes, bit: int) -> None:
        page = self._pages.get(name)
        if page is not None:
            page.noted &= ~bit
            self._leave(name)

    def _leave(self, name: bytes) -> None:
        """Drops a page that nobody holds."""
        page = self._pages[name]
        if not page.noted | page.told:
            del self._pages[name]

    def _shrink(self) -> None:
        while len(self._pages) > self._most_pages:
            name, page = self._pages.popitem(last=False)
            for unit, bit in self._bits.items():
                if page.noted & bit:
                    self._notes[unit].pop(name, None)

    def _path(self, model: str, tokens: Sequence[int], salt: str, width: int) -> _Path:
        """Returns the names of the prompt's pages. Those of the last few prompts are kept, because each is
        asked for several times while it is sent somewhere."""
        root = root_name(model, width, salt)
        key = id(tokens), root
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = _Path(root, tokens, width)  # it keeps the tokens, so their id is theirs
            while len(self._paths) > _PATHS:
                self._paths.popitem(last=False)
        return path
