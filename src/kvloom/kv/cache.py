"""The two-stage cache interface, accounting side (Microserving, table 2): what is held, and one plan a
forward for all its layers. The torch side is `kv/arena.py` and `exec/attention.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kvloom.kv.pages import BlockAllocator, PageTable
from kvloom.kv.prefix import PrefixTree, Recency, TokenIds
from kvloom.kv.sequences import Sends, SequencePages, SequenceTable
from kvloom.types.geometry import I32, I64, Geometry
from kvloom.types.job import ForwardPlan, PageCopy


def make_plan(
    model: str,
    table: SequenceTable,
    sequences: Sequence[int],
    appends: Sequence[int],
    copies: tuple[PageCopy, ...],
    ahead: int = 0,
    *,
    by_token: bool = False,
) -> ForwardPlan:
    """Returns the plan of a forward over sequences that have their pages for `appends[i]` more tokens each,
    or for `ahead`. by_token: each token is a row of its own."""
    helds = [table.held[sequence] for sequence in sequences]
    counts: I64 = np.asarray(appends, dtype=np.int64)
    starts: I64 = np.asarray([held.length for held in helds], dtype=np.int64)
    rows = np.asarray([held.row for held in helds])
    tables = table.tables[rows, : max(held.pages for held in helds)]
    batch, positions = np.arange(len(helds)), starts
    if max(appends) > 1:
        firsts = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
        batch = np.repeat(batch, counts)
    if by_token:
        sequences, tables = [sequences[i] for i in batch.tolist()], tables[batch]
        starts, counts = positions, np.ones_like(positions)
        batch = np.arange(len(positions))
    edge, offset = np.divmod(positions, table.width)
    sends = tuple(
        transfer.owed(table.row(held), held.length, held.length + count, table.pages.rank_blocks)
        for held, count in zip(helds, appends, strict=True)
        for transfer in held.sends
        if transfer.sent < held.length + count
    )
    return ForwardPlan(
        model=model,
        sequences=tuple(sequences),
        appends=counts,
        starts=starts,
        page_map=table.pages.map,
        tables=tables,
        positions=positions,
        slot_page=tables[batch, edge],
        slot_offset=offset.astype(np.int32),
        copies=copies,
        sends=sends,
        versions=table.pages.versions,
        ahead=ahead,
    )


class ModelCache:
    """One model's sequences over the shared pool.

    Nothing here locks: one thread plans. Every method either does all it says or raises and changes nothing:
    OutOfBlocks if the pool is short, ValueError if the call makes no sense.
    """

    def __init__(
        self,
        model: str,
        geometry: Geometry,
        allocator: BlockAllocator,
        recency: Recency,
        *,
        max_sequences: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.pages = PageTable(geometry, allocator)
        self.prefixes = PrefixTree(self.pages, recency, model)
        self._table = SequenceTable(
            model, self.pages, self.prefixes, max_sequences=max_sequences, max_tokens=max_tokens
        )
        self.sends = Sends(self._table)
        self.copying: list[int] = []  # pages that running forwards copy from, and so hold

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def used_blocks(self) -> int:
        """Blocks held, but for the cached ones that may be reclaimed."""
        return self.pages.used_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks of cached pages that nobody uses."""
        return self.pages.idle_blocks

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._table.held)

    def length(self, sequence: int) -> int:
        """Returns the number of tokens whose K and V are valid."""
        return self._table.held[sequence].length

    def page_list(self, sequence: int) -> list[int]:
        return self._table.page_list(self._table.held[sequence])

    def holders(self) -> Counter[int]:
        """Returns how often each page is held, counted anew: what `pages.refs` must say."""
        found = Counter(self.copying) + self.sends.held + Counter(self.prefixes.holders())
        for held in self._table.held.values():
            found.update([*self._table.page_list(held), *held.left])
        return found

    def add_sequence(self, sequence: int, salt: str = "") -> None:
        self._table.add(sequence, salt)

    def remove_sequence(self, sequence: int) -> None:
        """Gives back all pages of a sequence. No forward that includes it may run, and no peer may still
        write."""
        held = self._table.idle(sequence)
        if held.reserved:
            raise ValueError(f"sequence {sequence} waits for {held.reserved} tokens; commit those first")
        self._table.remove(sequence)

    def fork_sequence(self, parent: int, child: int) -> None:
        """Lets `child` begin with the parent's tokens, in shared pages; the page that both would write next
        is copied when one of them does."""
        held = self._table.idle(parent)
        pages = self._table.page_list(held)[: self.geometry.pages(held.length)]
        self._table.share(self._table.add(child, held.salt), pages, held.length)

    # -- the prefix tree ------------------------------------------------------------------------------

    def adopt(
        self, sequence: int, tokens: TokenIds, limit: int, *, salt: str = "", whole_pages: bool = False
    ) -> int:
        """Adds a sequence that begins with the longest prefix of tokens[:limit] that is cached with `salt`.
        Returns the length of that. The sequence shares those pages; the last is copied when the sequence
        writes to it. What the sequence computes is cached with that salt too. whole_pages: takes no part of
        a page, for a peer writes at once."""
        held = self._table.add(sequence, salt)
        pages, length = self.prefixes.match(tokens, limit, salt)
        if whole_pages:
            length -= length % self.geometry.tokens_per_block
        self._table.share(held, pages[: self.geometry.pages(length)], length)
        return length

    def keep(self, sequence: int, tokens: TokenIds, *, tail: bool = False) -> None:
        """Caches the sequence's valid tokens, which `tokens` begins with, as far as they fill pages; with
        `tail` all of them, for a sequence that is removed next. If the same is cached already the sequence
        goes over to those pages, unless it ships from its own."""
        held = self._table.idle(sequence)
        if held.reserved or len(tokens) < held.length:
            raise ValueError(
                f"cannot keep {held.length} tokens: {len(tokens)} are known, {held.reserved} more reserved"
            )
        count = held.length if tail else held.length - held.length % self.geometry.tokens_per_block
        own = self._table.page_list(held)[: self.geometry.pages(count)]
        pages = self.prefixes.insert(tokens[:count], own, held.salt)
        if not held.ships:
            self._table.switch(held, pages)

    # -- receiving ------------------------------------------------------------------------------------

    def prepare_receive(self, sequence: int, count: int) -> I32:
        """Reserves room for `count` more tokens, which a peer will write. Returns the blocks [pages, layers,
        kv_heads] of the pages that hold them; if the unit has several ranks, those of each."""
        held = self._table.idle(sequence)
        if held.reserved or count < 1:
            raise ValueError(f"cannot reserve {count} tokens: {held.reserved} are reserved already")
        if self._table.shares_tail(held):  # a peer writes at once, so the page must be this sequence's own
            raise ValueError(f"sequence {sequence} shares its last page; adopt whole pages first")
        self._table.grow([held], [count])
        held.reserved = count
        blocks: I32 = self.pages.map[self._table.row(held)[held.length // self.geometry.tokens_per_block :]]
        return blocks

    def commit_receive(self, sequence: int, count: int) -> None:
        """Makes the first `count` of the reserved tokens the sequence's own, and gives up the others."""
        held = self._table.idle(sequence)
        if not 0 <= count <= held.reserved:
            raise ValueError(f"cannot commit {count} of {held.reserved} reserved tokens")
        held.length, held.reserved = held.length + count, 0
        self._table.trim(held)

    # -- one forward ----------------------------------------------------------------------------------

    def blocks_for(self, sequence: int, count: int) -> int:
        """Returns the blocks that appending `count` tokens takes at least, a copied page included. For a
        sequence that is not there yet it is the number without anything cached, which is the most that it
        takes."""
        held = self._table.held.get(sequence)
        if held is None:
            return self.geometry.blocks(count)
        return self._table.need_each([held], count) * self.geometry.blocks_per_page

    def blocks_for_each(self, sequences: Sequence[int], count: int) -> int:
        """Returns the blocks that appending `count` tokens to each of these takes at least, copied pages
        included."""
        helds = [self._table.held[sequence] for sequence in sequences]
        return self._table.need_each(helds, count) * self.geometry.blocks_per_page

    def shares_a_tail(self, sequences: Sequence[int]) -> bool:
        """Returns whether the next token of one of these goes into a page that others hold, so that it is
        copied."""
        return any(self._table.shares_tail(self._table.held[sequence]) for sequence in sequences)

    def begin_forward(
        self, sequences: Sequence[int], appends: Sequence[int], ahead: int = 0, *, by_token: bool = False
    ) -> ForwardPlan:
        """Takes the blocks for `appends[i]` more tokens of each sequence, and plans all layers. ahead: tokens
        that each has blocks for at once, if the forward may go on to them (`extend_forward`). by_token: plans
        a decode step in which each token is a row of its own, so that a sequence may have several."""
        helds = [self._table.idle(sequence) for sequence in sequences]
        if len(set(sequences)) != len(sequences) or min(appends) < 1 or any(h.reserved for h in helds):
            raise ValueError("a forward takes idle sequences, each once and by at least one token")
        copies = self._table.grow(helds, [max(count, ahead) for count in appends] if ahead else appends)
        self.copying.extend(copy.source for copy in copies)
        for held, count in zip(helds, appends, strict=True):
            held.planned = count
        return make_plan(self.model, self._table, sequences, appends, copies, ahead, by_token=by_token)

    def extend_forward(self, plan: ForwardPlan, count: int) -> None:
        """Takes the blocks of a forward that goes on, for `count` tokens of each sequence in all."""
        helds = [self._table.held[sequence] for sequence in plan.sequences]
        if any(held.planned > count for held in helds):
            raise ValueError(f"cannot extend a forward to {count} tokens: it has more")
        self._table.grow(helds, [count] * len(helds))
        for held in helds:
            held.planned = count

    def shorten_forward(self, plan: ForwardPlan) -> None:
        """Gives back the blocks ahead of a running forward, which goes on to no more tokens than it has."""
        for sequence in plan.sequences if plan.ahead else ():
            self._table.trim(self._table.held[sequence])

    def end_forward(self, plan: ForwardPlan, valid: Mapping[int, int] | None = None) -> None:
        """Makes the tokens valid that the forward has written. valid: the number of a sequence's that are, if
        not all, by its id; others are as if they had not been written."""
        owners = self._copiers(plan)
        for sequence, count in (valid or {}).items():
            held = self._table.held[sequence]
            if not 1 <= count <= held.planned:
                raise ValueError(f"sequence {sequence}: {count} of {held.planned} tokens cannot be valid")
            held.planned = count
        for sequence in plan.sequences:
            held = self._table.held[sequence]
            held.length, held.planned = held.length + held.planned, 0
            held.sends = [send for send in held.sends if send.end > held.length]
            if plan.ahead or (valid and sequence in valid):
                self._table.trim(held)  # of what it did not come to
        for copy in plan.copies:
            self.copying.remove(copy.source)
            if owners[copy.target].ships:
                owners[copy.target].left.append(copy.source)
            else:
                self.pages.release([copy.source])

    def abort_forward(self, plan: ForwardPlan) -> None:
        """Undoes a forward that has failed: its tokens never were, nor perhaps its copies. A sequence that
        was to write to a copy has the shared page back, and with it the forward's hold on that page."""
        owners = self._copiers(plan)
        for copy in plan.copies:
            held = owners[copy.target]
            self._table.row(held)[held.length // self.geometry.tokens_per_block] = copy.source
            self.copying.remove(copy.source)
            self.pages.release([copy.target])
        for sequence in plan.sequences:
            held = self._table.held[sequence]
            held.planned = 0
            self._table.trim(held)

    def _copiers(self, plan: ForwardPlan) -> dict[int, SequencePages]:
        """Returns the sequence that each copy is for, by the copy's target."""
        if not plan.copies:
            return {}
        helds = [self._table.held[sequence] for sequence in plan.sequences]
        tails = {self._table.tail(held): held for held in helds}
        return {copy.target: tails[copy.target] for copy in plan.copies}
