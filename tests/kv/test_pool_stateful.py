"""Law 1 after every operation, whatever the order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.core.errors import OutOfBlocks
from kvloom.core.geometry import Geometry
from kvloom.core.plan import Plan
from kvloom.kv.pool import Pool

GEOMETRIES = {
    "wide": Geometry(layers=3, kv_heads=4, head_dim=16, itemsize=4, block_bytes=1024),
    "tall": Geometry(layers=5, kv_heads=1, head_dim=24, itemsize=2, block_bytes=1024),
}
TOTAL = 420
CONTEXT = 100


class PoolMachine(RuleBasedStateMachine):
    """Drives two models' caches over one pool and keeps a plain account of every sequence's tokens.

    Each token is a number; `written` maps (model, page, offset) to the token that a forward put there, so
    that sharing and copy on write are checked by content and not by count alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(TOTAL, GEOMETRIES, max_sequences=8, max_tokens=dict.fromkeys(GEOMETRIES, CONTEXT))
        self.next_id = 0
        self.next_token = 0
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.written: dict[tuple[str, int, int], int] = {}
        self.flights: list[tuple[Plan, list[list[int]]]] = []
        self.reserved: dict[tuple[str, int], int] = {}

    def pick(self, data: st.DataObject) -> tuple[str, int]:
        return data.draw(st.sampled_from(sorted(self.idle())))

    def idle(self) -> set[tuple[str, int]]:
        flying = {(plan.model, s) for plan, _ in self.flights for s in plan.sequences}
        return set(self.tokens) - flying - set(self.reserved)

    @rule(model=st.sampled_from(sorted(GEOMETRIES)))
    def add(self, model: str) -> None:
        cache = self.pool.caches[model]
        if len(cache.sequences) == 8:
            with pytest.raises(ValueError, match="no room"):
                cache.add_sequence(self.next_id)
            return
        cache.add_sequence(self.next_id)
        self.tokens[model, self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        model, sequence = self.pick(data)
        self.pool.caches[model].remove_sequence(sequence)
        del self.tokens[model, sequence]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        model, parent = self.pick(data)
        cache = self.pool.caches[model]
        if len(cache.sequences) == 8:
            return
        at = data.draw(st.integers(0, len(self.tokens[model, parent])))
        cache.fork_sequence(parent, self.next_id, at)
        self.tokens[model, self.next_id] = self.tokens[model, parent][:at]
        self.next_id += 1

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        model, sequence = self.pick(data)
        tokens = self.tokens[model, sequence]
        count = data.draw(st.integers(0, len(tokens)))
        self.pool.caches[model].pop_tokens(sequence, count)
        del tokens[len(tokens) - count :]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        model, _ = self.pick(data)
        cache = self.pool.caches[model]
        mine = sorted(s for m, s in self.idle() if m == model)
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=4, unique=True))
        room = [min(20, CONTEXT - len(self.tokens[model, s])) for s in chosen]
        if min(room) < 1:
            return
        appends = [data.draw(st.integers(1, most)) for most in room]
        need = sum(cache.blocks_for(s, n) for s, n in zip(chosen, appends, strict=True))
        free = self.pool.free
        try:
            plan = cache.begin_forward(chosen, appends)
        except OutOfBlocks:
            assert need > free
            assert self.pool.free == free
            return
        assert free - self.pool.free == need
        new = [[self.token() for _ in range(n)] for n in appends]
        for copy in plan.copies:
            for offset in range(copy.tokens):
                self.written[model, copy.target, offset] = self.written[model, copy.source, offset]
        flat = [token for tokens in new for token in tokens]
        for page, offset, token in zip(plan.slot_page, plan.slot_offset, flat, strict=True):
            self.written[model, int(page), int(offset)] = token
        self.flights.append((plan, new))

    def token(self) -> int:
        self.next_token += 1
        return self.next_token

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        plan, new = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        cache = self.pool.caches[plan.model]
        if fails:
            cache.abort_forward(plan)
            return
        cache.end_forward(plan)
        for sequence, tokens in zip(plan.sequences, new, strict=True):
            self.tokens[plan.model, sequence] += tokens

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(1, 20))
    def reserve(self, data: st.DataObject, count: int) -> None:
        model, sequence = self.pick(data)
        cache = self.pool.caches[model]
        if len(self.tokens[model, sequence]) + count > CONTEXT:
            return
        try:
            address = cache.prepare_receive(sequence, count)
        except (OutOfBlocks, ValueError):
            return
        assert address.tokens == count == len(list(address.slots()))
        self.reserved[model, sequence] = count
        new = [self.token() for _ in range(count)]
        width = cache.geometry.tokens_per_block
        for slot, token in zip(address.slots(), new, strict=True):
            self.written[model, slot // width, slot % width] = token

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), arrived=st.booleans())
    def settle(self, data: st.DataObject, arrived: bool) -> None:
        model, sequence = data.draw(st.sampled_from(sorted(self.reserved)))
        count = self.reserved.pop((model, sequence))
        cache = self.pool.caches[model]
        if not arrived:
            cache.cancel_receive(sequence)
            return
        cache.commit_receive(sequence)
        width, tokens = cache.geometry.tokens_per_block, self.tokens[model, sequence]
        pages = cache.page_list(sequence)
        for position in range(len(tokens), len(tokens) + count):
            tokens.append(self.written[model, pages[position // width], position % width])

    @invariant()
    def conserves(self) -> None:
        self.pool.check()

    @invariant()
    def holds_what_was_written(self) -> None:
        flying = {(plan.model, s) for plan, _ in self.flights for s in plan.sequences}
        for (model, sequence), tokens in self.tokens.items():
            cache = self.pool.caches[model]
            assert cache.length(sequence) == len(tokens)
            if (model, sequence) in flying:
                continue
            width, pages = cache.geometry.tokens_per_block, cache.page_list(sequence)
            found = [self.written[model, pages[p // width], p % width] for p in range(len(tokens))]
            assert found == tokens

    def teardown(self) -> None:
        for plan, _ in self.flights:
            self.pool.caches[plan.model].abort_forward(plan)
        for model, sequence in self.reserved:
            self.pool.caches[model].cancel_receive(sequence)
        for model, sequence in self.tokens:
            self.pool.caches[model].remove_sequence(sequence)
        self.pool.check()
        assert self.pool.free == TOTAL


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True)
