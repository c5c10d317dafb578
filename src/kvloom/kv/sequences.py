"""The sequences of a model: which pages each is made of, and how it gets and loses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.kv.pages import PageTable
from kvloom.kv.prefix import PrefixTree
from kvloom.types.geometry import I32
from kvloom.types.job import PageCopy
from kvloom.types.transfer import PageCopies, Transfer


@dataclass(slots=True)
class SequencePages:
    """The row of one sequence in the table. [0, length) is valid, [length, length + planned) is being
    written, [length, length + reserved) waits for a peer's write; pages cover all of it."""

    row: int
    salt: str = ""
    """That with which its tokens are cached."""
    pages: int = 0
    length: int = 0
    planned: int = 0
    reserved: int = 0
    ships: bool = False
    """Whether K and V of it have gone to a peer, whose copies may still read its pages."""
    sends: list[Transfer] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    """Pages that it ships from and has a copy of instead, so that it is still their holder."""


class SequenceTable:
    """The page tables of one model's sequences."""

    def __init__(
        self, model: str, pages: PageTable, prefixes: PrefixTree, *, max_sequences: int, max_tokens: int
    ) -> None:
        self.model = model
        self.pages = pages
        self.width = pages.geometry.tokens_per_block
        self.tables: I32 = np.zeros((max_sequences, pages.geometry.pages(max_tokens)), dtype=np.int32)
        """[max_sequences, pages] page ids, each sequence's in its own row."""
        self._cells = self.tables.data  # for single ids
        self.held: dict[int, SequencePages] = {}
        self._prefixes = prefixes
        self._rows = list(range(max_sequences - 1, -1, -1))

    def add(self, sequence: int, salt: str) -> SequencePages:
        if sequence in self.held:
            raise ValueError(f"sequence {sequence} exists already")
        if not self._rows:
            raise ValueError(f"{self.model}: no room for more than {len(self.held)} sequences")
        held = self.held[sequence] = SequencePages(self._rows.pop(), salt)
        return held

    def remove(self, sequence: int) -> None:
        held = self.held.pop(sequence)
        self.pages.release([*self.page_list(held), *held.left])
        self._rows.append(held.row)

    def idle(self, sequence: int) -> SequencePages:
        held = self.held[sequence]
        if held.planned:
            raise ValueError(f"sequence {sequence} is in a running forward")
        return held

    def row(self, held: SequencePages) -> I32:
        """Returns [pages] ids, a view."""
        return self.tables[held.row, : held.pages]

    def page_list(self, held: SequencePages) -> list[int]:
        pages: list[int] = self.row(held).tolist()
        return pages

    def share(self, held: SequencePages, pages: Sequence[int], length: int) -> None:
        """Lets an empty sequence begin with `length` tokens in `pages`, which it holds with others."""
        held.pages, held.length = len(pages), length
        self.row(held)[:] = pages
        self.pages.retain(pages)

    def switch(self, held: SequencePages, pages: Sequence[int]) -> None:
        """Replaces the first pages of a sequence by `pages`, which hold the same tokens."""
        for i, (own, page) in enumerate(zip(self.page_list(held), pages, strict=False)):
            if own != page:
                self.pages.retain([page])
                self.pages.release([own])
                self.tables[held.row, i] = page

    def trim(self, held: SequencePages) -> None:
        """Releases the pages past the sequence's tokens, and those that are to come."""
        keep = self.pages.geometry.pages(held.length + held.planned + held.reserved)
        self.pages.release(self.page_list(held)[keep:])
        held.pages = keep

    # -- growth ---------------------------------------------------------------------------------------

    def tail(self, held: SequencePages) -> int | None:
        """Returns the page that the next token goes into, if it holds tokens already; None for a new one."""
        edge, offset = divmod(held.length, self.width)
        return self._cells[held.row, edge] if offset else None

    def shares_tail(self, held: SequencePages) -> bool:
        tail = self.tail(held)
        return tail is not None and self.pages.refs[tail] > 1

    def need_each(self, helds: Sequence[SequencePages], count: int) -> int:
        """Returns the pages that appending `count` tokens to each of these takes at least, copied ones
        included."""
        fresh, shared = self._growth(helds, [count] * len(helds))
        return sum(fresh) + sum(not self._takers([held]) for held in shared)

    def _growth(
        self, helds: Sequence[SequencePages], appends: Sequence[int]
    ) -> tuple[list[int], list[SequencePages]]:
        """Returns how many new pages each takes for its new tokens, and those that share their tail.
        This is asked several times a job."""
        refs, cells, width = self.pages.refs, self._cells, self.width
        fresh, shared = list[int](), list[SequencePages]()
        for held, count in zip(helds, appends, strict=True):
            length = held.length
            more = -(-(length + count) // width) - held.pages
            fresh.append(more if more > 0 else 0)
            if length % width and refs[cells[held.row, length // width]] > 1:
                shared.append(held)
        return fresh, shared

    def grow(self, helds: Sequence[SequencePages], appends: Sequence[int]) -> tuple[PageCopy, ...]:
        """Gives each sequence the pages for its new tokens, and one of its own for a tail that others hold.

        The shared page stays retained until the forward, which copies it, has ended: another holder may be
        writing at the same time otherwise. If the pool is too short for a copy, and only the prefix tree
        holds the page beside these sequences, one of them writes to it, and the tree lets go of it: what is
        cached never costs a sequence more than it would take without.
        """
        fresh, shared = self._growth(helds, appends)
        if not shared and not any(fresh):
            return ()
        if any(held.pages + more > self.tables.shape[1] for held, more in zip(helds, fresh, strict=True)):
            raise ValueError(
                f"{self.model}: a sequence would outgrow its table of {self.tables.shape[1]} pages"
            )
        need = sum(fresh) + len(shared)
        takers = self._takers(shared)[: max(need - self.pages.available, 0)]
        new = self.pages.allocate(need - len(takers))
        for held in takers:
            self._prefixes.give_up(self._cells[held.row, held.length // self.width])
        copies = [self._copy_tail(held, new.pop()) for held in shared if held not in takers]
        for held, more in zip(helds, fresh, strict=True):
            for at in range(held.pages, held.pages + more):
                self._cells[held.row, at] = new.pop()
            held.pages += more
        return tuple(copies)

    def _takers(self, shared: Sequence[SequencePages]) -> list[SequencePages]:
        """Returns, for each tail that some of these share with each other and the tree alone, the one with
        the most tokens in it: what that one writes, nobody else has read."""
        users = Counter(self.tail(held) for held in shared)
        most: dict[int, SequencePages] = {}
        for held in shared:
            tail = self.tail(held)
            if tail is None or not self.pages.cached[tail] or self.pages.refs[tail] != 1 + users[tail]:
                continue
            if tail not in most or most[tail].length < held.length:
                most[tail] = held
        return list(most.values())

    def _copy_tail(self, held: SequencePages, page: int) -> PageCopy:
        edge, offset = divmod(held.length, self.width)
        copy = PageCopy(self._cells[held.row, edge], page, offset)
        self._cells[held.row, edge] = page
        return copy


class Sends:
    """The transfers of one model's sequences. Errors are as of `ModelCache`."""

    def __init__(self, table: SequenceTable) -> None:
        self.held: Counter[int] = Counter()
        """Pages that transfers copy from, by `hold`."""
        self._table = table
        self._geometry = table.pages.geometry

    def begin(self, sequence: int, transfer: Transfer, computed: int) -> None:
        """Sends the `computed` tokens of a sequence at once; later ones go with their forwards."""
        ready = min(computed, transfer.end)
        if ready > transfer.sent:
            self.planned(sequence, transfer, ready).put_all(self._table.pages.map)
            transfer.sent = ready
        if transfer.sent < transfer.end:
            self.mark(sequence, transfer)

    def planned(self, sequence: int, transfer: Transfer, end: int) -> PageCopies:
        """Returns what to put for the tokens up to `end` that the transfer has not sent yet, which are valid;
        `hold` keeps their pages when the sequence is gone."""
        held = self._table.idle(sequence)
        if end > held.length:
            raise ValueError(f"cannot send up to {end}: sequence {sequence} holds {held.length} tokens")
        self._refuse_other(transfer, end)
        pages = self._table.pages
        owed = transfer.owed(self._table.row(held), transfer.sent, end, pages.rank_blocks)
        held.ships = True
        return owed

    def mark(self, sequence: int, transfer: Transfer) -> None:
        """Marks a sequence so that each forward from the next one on plans to send those tokens of the
        transfer that it computes. They are none of the sequence's valid tokens, which `planned` is for.
        Raises BadRequest if the address does not list the blocks of its pages."""
        held = self._table.idle(sequence)
        if transfer.sent < held.length:
            raise ValueError(f"tokens from {transfer.sent} on: {held.length} are computed already")
        self._refuse_other(transfer, transfer.end)
        held.sends.append(transfer)
        held.ships = True

    def leave(self, sequence: int, transfer: Transfer) -> None:
        """Keeps the pages of a sequence that is about to lose them until `settle`: copies may still read from
        them."""
        if not transfer.over:
            transfer.held += self.hold(sequence, transfer.address.begin, transfer.sent)

    def settle(self, transfer: Transfer) -> None:
        """Lets go of the pages that were kept for a transfer that is over."""
        self.let_go(transfer.held)
        transfer.held = []

    def hold(self, sequence: int, begin: int, end: int) -> list[int]:
        """Keeps the pages of tokens [begin, end), as far as the sequence has them, until `let_go`, whatever
        becomes of it, and with them those that it sent from before it had a copy of its own."""
        held = self._table.idle(sequence)
        end = min(end, held.length)
        first = begin // self._table.width
        pages = self._table.page_list(held)[first : self._geometry.pages(end)] if begin < end else []
        self._table.pages.retain(pages)
        pages += held.left
        held.left = []
        self.held.update(pages)
        return pages

    def let_go(self, pages: Sequence[int]) -> None:
        """Undoes `hold` for these pages."""
        if not Counter(pages) <= self.held:
            raise ValueError("a page was let go that no transfer holds")
        self.held -= Counter(pages)
        self._table.pages.release(pages)

    def _refuse_other(self, transfer: Transfer, end: int) -> None:
        """Raises ValueError if the address does not take the unsent tokens up to `end` of this model, and
        BadRequest if it does not list its blocks."""
        address, geometry = transfer.address, self._geometry
        form, heads = address.form, geometry.kv_heads * geometry.ranks
        own = (geometry.layers, heads, geometry.tokens_per_block)
        theirs = (form.layers, form.kv_heads, form.tokens_per_block)
        if (address.model, *theirs) != (self._table.model, *own):
            raise ValueError(f"an address of {(address.model, *theirs)} is none for {self._table.model}")
        if not address.begin <= transfer.sent < end <= address.end:
            raise ValueError(
                f"[{transfer.sent}, {end}) is not within the address, which takes "
                f"[{address.begin}, {address.end})"
            )
        _ = address.block_map
