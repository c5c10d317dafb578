"""The two-stage cache interface, accounting side (Microserving, table 2): what is held, and one plan a
forward for all its layers. The torch side is `kv/arena.py` and `model/attention.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.core.geometry import Geometry
from kvloom.core.plan import I32, I64, PageCopy, PageSend, Plan
from kvloom.kv.address import KVAddress
from kvloom.kv.allocator import BlockAllocator
from kvloom.kv.pages import PageTable


@dataclass(slots=True)
class _Held:
    """One sequence's row in the table. [0, length) is valid, [length, length + planned) is being written,
    [length, length + reserved) waits for a peer's write; pages cover all of it."""

    row: int
    pages: int = 0
    length: int = 0
    planned: int = 0
    reserved: int = 0
    sends: list[tuple[int, KVAddress]] = field(default_factory=list)


class ModelCache:
    """One model's sequences over the shared pool.

    Nothing here locks: one thread plans. Every method either does all it says or raises and changes
    nothing: OutOfBlocks where the pool is short, ValueError where the call makes no sense.
    """

    def __init__(
        self,
        model: str,
        geometry: Geometry,
        allocator: BlockAllocator,
        *,
        max_sequences: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.pages = PageTable(geometry, allocator)
        self._tables: I32 = np.zeros((max_sequences, geometry.pages(max_tokens)), dtype=np.int32)
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._held: dict[int, _Held] = {}
        self.copying: list[int] = []  # pages that running forwards copy from, and so hold

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def used_blocks(self) -> int:
        return self.pages.used_blocks

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._held)

    def length(self, sequence: int) -> int:
        """Tokens whose K and V are valid."""
        return self._held[sequence].length

    def page_list(self, sequence: int) -> list[int]:
        held = self._held[sequence]
        return [int(page) for page in self._tables[held.row, : held.pages]]

    def add_sequence(self, sequence: int) -> None:
        if sequence in self._held:
            raise ValueError(f"sequence {sequence} exists already")
        if not self._rows:
            raise ValueError(f"{self.model}: no room for more than {len(self._held)} sequences")
        self._held[sequence] = _Held(self._rows.pop())

    def remove_sequence(self, sequence: int) -> None:
        """Give back all its pages. Not while a forward runs that includes it, or a peer may still write."""
        held = self._idle(sequence)
        if held.reserved:
            raise ValueError(f"sequence {sequence} waits for {held.reserved} tokens; cancel that first")
        self.pages.release(self.page_list(sequence))
        self._rows.append(held.row)
        del self._held[sequence]

    def fork_sequence(self, parent: int, child: int, at: int | None = None) -> None:
        """`child` begins with the parent's first `at` tokens (all by default), sharing their pages; the
        page that both would write next is copied when one of them does."""
        held = self._idle(parent)
        at = held.length if at is None else at
        if not 0 <= at <= held.length:
            raise ValueError(f"fork at {at}, but sequence {parent} holds {held.length} tokens")
        self.add_sequence(child)
        new = self._held[child]
        new.pages, new.length = self.geometry.pages(at), at
        shared = self._tables[held.row, : new.pages]
        self._tables[new.row, : new.pages] = shared
        self.pages.retain(int(page) for page in shared)

    def pop_tokens(self, sequence: int, count: int) -> None:
        """Forget the last `count` tokens."""
        held = self._idle(sequence)
        if held.reserved or not 0 <= count <= held.length:
            raise ValueError(f"cannot pop {count} of {held.length} tokens ({held.reserved} reserved)")
        held.length -= count
        self._trim(held)

    # -- receiving and sending ------------------------------------------------------------------------

    def prepare_receive(self, sequence: int, count: int) -> KVAddress:
        """Reserve room for `count` more tokens, which a peer will write, and say where."""
        held = self._idle(sequence)
        if held.reserved or count < 1:
            raise ValueError(f"cannot reserve {count} tokens: {held.reserved} are reserved already")
        if self._tail_is_shared(held):  # a peer writes at once, so the page must be this sequence's own
            raise ValueError(f"sequence {sequence} shares its last page; pop it to a page edge first")
        self._grow([held], [count])
        held.reserved = count
        tokens = self.geometry.tokens_per_block
        row = self._tables[held.row]
        positions = range(held.length, held.length + count)
        slots = [int(row[p // tokens]) * tokens + p % tokens for p in positions]
        return KVAddress.compress(self.model, tokens, slots)

    def commit_receive(self, sequence: int) -> None:
        """The reserved tokens have arrived and are the sequence's own."""
        held = self._held[sequence]
        held.length, held.reserved = held.length + held.reserved, 0

    def cancel_receive(self, sequence: int) -> None:
        held = self._held[sequence]
        held.reserved = 0
        self._trim(held)

    def mark_send(self, sequence: int, begin: int, address: KVAddress) -> None:
        """From the next forward on, send this sequence's tokens from `begin` to `address`: those held
        already with that forward, newer ones with the forward that computes them."""
        if address.tokens_per_block != self.geometry.tokens_per_block or address.model != self.model:
            raise ValueError(f"address of {address.model} ({address.tokens_per_block} tokens a block)")
        self._held[sequence].sends.append((begin, address))

    # -- one forward ----------------------------------------------------------------------------------

    def blocks_for(self, sequence: int, count: int) -> int:
        """Blocks that appending `count` tokens would take, a copied page included."""
        held = self._held.get(sequence)
        if held is None:
            return self.geometry.blocks(count)
        fresh = self.geometry.pages(held.length + count) - held.pages
        return (max(fresh, 0) + self._tail_is_shared(held)) * self.geometry.blocks_per_page

    def begin_forward(self, sequences: Sequence[int], appends: Sequence[int]) -> Plan:
        """Take the blocks for `appends[i]` more tokens of each sequence and plan all layers."""
        helds = [self._idle(sequence) for sequence in sequences]
        if len(set(sequences)) != len(sequences) or min(appends) < 1 or any(h.reserved for h in helds):
            raise ValueError("a forward takes idle sequences, each once and by at least one token")
        copies = self._grow(helds, appends)
        self.copying.extend(copy.source for copy in copies)
        for held, count in zip(helds, appends, strict=True):
            held.planned = count
        return self._plan(sequences, helds, appends, copies)

    def end_forward(self, plan: Plan) -> None:
        """The forward has written what it planned: the tokens are valid now."""
        for sequence, count in zip(plan.sequences, plan.appends.tolist(), strict=True):
            held = self._held[sequence]
            held.length, held.planned = held.length + count, 0
            held.sends = [
                (max(begin, held.length), address.skip(held.length - begin))
                for begin, address in held.sends
                if begin + address.tokens > held.length
            ]
        self._copied(plan)

    def abort_forward(self, plan: Plan) -> None:
        """The forward failed: its tokens never were, nor perhaps its copies. Who was to write to one has the
        shared page back, and with it the forward's hold on that page."""
        sources = {copy.target: copy.source for copy in plan.copies}
        for sequence in plan.sequences:
            held = self._held[sequence]
            held.planned = 0
            self._trim(held)
            row, edge = self._tables[held.row], held.length // self.geometry.tokens_per_block
            target = int(row[edge]) if edge < held.pages else -1
            if target in sources:
                row[edge] = sources[target]
                self.copying.remove(sources[target])
                self.pages.release([target])

    # -- inside ---------------------------------------------------------------------------------------

    def _idle(self, sequence: int) -> _Held:
        held = self._held[sequence]
        if held.planned:
            raise ValueError(f"sequence {sequence} is in a running forward")
        return held

    def _tail_is_shared(self, held: _Held) -> bool:
        edge, offset = divmod(held.length, self.geometry.tokens_per_block)
        return bool(offset) and int(self.pages.refs[self._tables[held.row, edge]]) > 1

    def _grow(self, helds: Sequence[_Held], appends: Sequence[int]) -> tuple[PageCopy, ...]:
        """Give each sequence the pages for its new tokens, and one of its own for a tail that others hold.

        The shared page stays retained until the forward, which copies it, has ended: another holder may
        be writing at the same time otherwise."""
        fresh = [self.geometry.pages(h.length + n) - h.pages for h, n in zip(helds, appends, strict=True)]
        if any(h.pages + n > self._tables.shape[1] for h, n in zip(helds, fresh, strict=True)):
            raise ValueError(
                f"{self.model}: a sequence would outgrow its table of {self._tables.shape[1]} pages"
            )
        shared = [held for held in helds if self._tail_is_shared(held)]
        new = self.pages.allocate(sum(fresh) + len(shared))
        copies = []
        for held in shared:
            edge, offset = divmod(held.length, self.geometry.tokens_per_block)
            copies.append(PageCopy(int(self._tables[held.row, edge]), new.pop(), offset))
            self._tables[held.row, edge] = copies[-1].target
        for held, count in zip(helds, fresh, strict=True):
            for _ in range(count):
                self._tables[held.row, held.pages] = new.pop()
                held.pages += 1
        return tuple(copies)

    def _copied(self, plan: Plan) -> None:
        for copy in plan.copies:
            self.copying.remove(copy.source)
            self.pages.release([copy.source])

    def _trim(self, held: _Held) -> None:
        """Release the pages past the sequence's tokens."""
        keep = self.geometry.pages(held.length + held.reserved)
        self.pages.release(int(page) for page in self._tables[held.row, keep : held.pages])
        held.pages = keep

    def _plan(
        self,
        sequences: Sequence[int],
        helds: Sequence[_Held],
        appends: Sequence[int],
        copies: tuple[PageCopy, ...],
    ) -> Plan:
        counts: I64 = np.asarray(appends, dtype=np.int64)
        starts: I64 = np.asarray([held.length for held in helds], dtype=np.int64)
        rows = np.asarray([held.row for held in helds])
        tables = self._tables[rows, : max(held.pages for held in helds)]
        firsts = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
        batch = np.repeat(np.arange(len(helds)), counts)
        edge, offset = np.divmod(positions, self.geometry.tokens_per_block)
        return Plan(
            model=self.model,
            sequences=tuple(sequences),
            appends=counts,
            starts=starts,
            page_map=self.pages.map,
            tables=tables,
            positions=positions,
            slot_page=tables[batch, edge],
            slot_offset=offset.astype(np.int32),
            copies=copies,
            sends=tuple(send for held in helds for send in self._sends(held)),
        )

    def _sends(self, held: _Held) -> list[PageSend]:
        """The token copies that this forward owes the sequence's receivers, a page run at a time."""
        tokens = self.geometry.tokens_per_block
        end = held.length + held.planned
        out: list[PageSend] = []
        for begin, address in held.sends:
            position = begin
            for first, length in address.runs:
                slot, left = first, min(length, end - position)
                while left > 0:
                    edge, offset = divmod(position, tokens)
                    target, into = divmod(slot, tokens)
                    step = min(left, tokens - offset, tokens - into)
                    out.append(PageSend(int(self._tables[held.row, edge]), target, offset, into, step))
                    position, slot, left = position + step, slot + step, left - step
        return out
