"""What a play over a pool has on stage, and what is checked whenever it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvloom.kv.prefix import PinnedPath
from kvloom.types.errors import OutOfBlocks
from kvloom.types.job import ForwardPlan
from tests.kv.account import CONTEXT, GEOMETRIES, SEQUENCES, TOTAL, Account, Contents, Name, after
from tests.kv.trees import cached_tokens, check_form, longest, nodes, salts

_PARTS = (0, 3, 16, 21)


def text(random: Random, begin: int, end: int) -> list[int]:
    """Positions [begin, end) of one of a few texts, which begin alike and part at their own positions: of any
    two, the same pages are cached now and then."""
    kind = random.randrange(len(_PARTS))
    return [kind if position >= _PARTS[kind] else 0 for position in range(begin, end)]


@dataclass
class Shipping:
    """What one sequence ships: tokens [sent, end) are marked; `read`: what copies may still read."""

    sent: int
    end: int
    read: Contents = field(default_factory=dict)


class Stage:
    """Two models' caches over one pool, their account, and who does what with them now."""

    def __init__(self) -> None:
        self.account = Account()
        self.pool = self.account.pool
        self.tokens = self.account.tokens
        self.flights: list[tuple[ForwardPlan, list[list[int]]]] = []
        self.reserved: dict[Name, list[int]] = {}
        self.shipping: dict[Name, Shipping] = {}
        self.held: list[tuple[str, list[int], Contents]] = []
        self.pinned: list[tuple[str, str, list[int], PinnedPath]] = []

    def flying(self) -> set[Name]:
        return {(plan.model, sequence) for plan, _ in self.flights for sequence in plan.sequences}

    def idle(self, model: str | None = None) -> list[Name]:
        names = sorted(set(self.tokens) - self.flying() - set(self.reserved))
        return [name for name in names if model in {None, name[0]}]

    def pick(self, random: Random, *, ships: bool = True) -> Name | None:
        names = [name for name in self.idle() if ships or name not in self.shipping]
        return random.choice(names) if names else None

    def full(self, model: str) -> bool:
        return len(self.pool.caches[model].sequences) == SEQUENCES

    def prompt(self, random: Random) -> list[int]:
        """One that may be cached in part."""
        known = [tokens for tokens in self.tokens.values() if tokens]
        if known and random.random() < 0.5:
            tokens = random.choice(known)
            tokens = tokens[: random.randint(1, len(tokens))]
        else:
            tokens = text(random, 0, random.randint(1, 40))
        return [*tokens, *text(random, len(tokens), len(tokens) + random.randint(0, 12))][:CONTEXT]

    # -- what is done, and checked -----------------------------------------------------------------------

    def do_adopt(self, name: Name, prompt: list[int], limit: int, *, salt: str, whole: bool = False) -> None:
        cache, width = self.account.cache(name), GEOMETRIES[name[0]].tokens_per_block
        cached = longest(cache.prefixes, prompt[:limit], salt)
        cached = cached // width * width if whole else cached
        assert cache.adopt(name[1], prompt, limit, salt=salt, whole_pages=whole) == cached
        self.tokens[name], self.account.salts[name] = prompt[:cached], salt

    def do_keep(self, name: Name, *, tail: bool) -> None:
        tokens, cache = self.tokens[name], self.account.cache(name)
        free, pages = self.pool.free, cache.page_list(name[1])
        cache.keep(name[1], [*tokens, 77, 78], tail=tail)
        assert self.pool.free >= free
        width = cache.geometry.tokens_per_block
        kept = tokens if tail else tokens[: len(tokens) // width * width]
        assert longest(cache.prefixes, kept, self.account.salts[name]) == len(kept)
        if name in self.shipping:
            assert cache.page_list(name[1]) == pages
        else:
            shared = cache.page_list(name[1])[: cache.geometry.pages(len(kept))]
            assert all(cache.pages.cached[page] for page in shared)

    def do_remove(self, name: Name, *, holds: bool = False) -> None:
        if holds:
            self.do_hold(name, 0, len(self.tokens[name]))
        self.shipping.pop(name, None)
        self.account.cache(name).remove_sequence(name[1])
        del self.tokens[name]

    def do_begin(self, model: str, chosen: Sequence[int], new: list[list[int]]) -> bool:
        """A forward begins where blocks_for says that there is room, and takes a copy of each shared tail
        where there is room for that too."""
        cache, pool = self.pool.caches[model], self.pool
        width, each = cache.geometry.tokens_per_block, cache.geometry.blocks_per_page
        appends, pages = [len(tokens) for tokens in new], [cache.page_list(s) for s in chosen]
        lengths = [cache.length(s) for s in chosen]
        need = sum(cache.blocks_for(s, n) for s, n in zip(chosen, appends, strict=True))
        tails = [p[-1] for p, length in zip(pages, lengths, strict=True) if length % width]
        shared = sum(cache.pages.refs[tail] > 1 for tail in tails)
        fresh = sum(cache.geometry.pages(n + m) for n, m in zip(lengths, appends, strict=True))
        fresh -= sum(map(len, pages))
        before = (pool.available, pool.free, cached_tokens(cache.prefixes), cache.pages.refs[:])
        try:
            plan = cache.begin_forward(chosen, appends)
        except OutOfBlocks:
            assert need > pool.available
            now = (pool.available, pool.free, cached_tokens(cache.prefixes), cache.pages.refs[:])
            assert now == before
            assert [cache.page_list(s) for s in chosen] == pages
            return False
        assert before[0] - pool.available == (fresh + len(plan.copies)) * each
        assert len(plan.copies) == shared or before[0] < (fresh + shared) * each
        self.account.fill(plan, new)
        self.check_sends(plan)
        self.flights.append((plan, new))
        return True

    def check_sends(self, plan: ForwardPlan) -> None:
        """Each marked token that the forward computes is sent from where it is written."""
        wanted: list[tuple[int, int]] = []
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.appends, strict=True):
            name = (plan.model, sequence)
            shipping = self.shipping.get(name)
            if shipping:
                last = min(int(start + count), shipping.end)
                wanted += self.account.places(name, max(int(start), shipping.sent), last)
        found = [
            (int(page), at)
            for send in plan.sends
            for page, offset, count in zip(send.pages, send.offsets, send.counts, strict=True)
            for at in range(offset, offset + count)
        ]
        assert sorted(found) == sorted(wanted)

    def do_end(self, plan: ForwardPlan, new: list[list[int]]) -> None:
        self.pool.caches[plan.model].end_forward(plan)
        for sequence, tokens in zip(plan.sequences, new, strict=True):
            name = (plan.model, sequence)
            start = len(self.tokens[name])
            self.tokens[name] += tokens
            shipping = self.shipping.get(name)
            if shipping:
                last = min(len(self.tokens[name]), shipping.end)
                shipping.read |= self.account.contents(name, max(start, shipping.sent), last)

    def do_hold(self, name: Name, begin: int, end: int) -> None:
        """What copies read from pages that the sequence has left goes over to the holder."""
        kept = self.account.contents(name, begin, end)
        shipping = self.shipping.get(name)
        if shipping:
            own = set(self.account.places(name, 0, len(self.tokens[name])))
            kept |= {place: code for place, code in shipping.read.items() if place not in own}
            shipping.read = {place: code for place, code in shipping.read.items() if place in own}
        pages = self.account.cache(name).sends.hold(name[1], begin, end)
        assert {page for page, _ in kept} <= set(pages)
        self.held.append((name[0], pages, kept))

    # -- what holds --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Law 1, and everybody's content."""
        self.pool.check()
        check_form(self.pool)
        for name in set(self.tokens) - self.flying():
            self.account.check_contents(name)
        for model, _, contents in self.held:
            self.account.check_written(model, contents)
        for name, shipping in self.shipping.items():
            self.account.check_written(name[0], shipping.read)
        for model, cache in self.pool.caches.items():
            for salt in salts(cache.prefixes):
                for path, node in nodes(cache.prefixes, salt):
                    codes = after(hash(salt), path)[len(path) - len(node.tokens) :]
                    places = [(node.page, offset) for offset in range(len(codes))]
                    self.account.check_written(model, dict(zip(places, codes, strict=True)))
            pinned = {node.page for _, node in nodes(cache.prefixes) if node.pins}
            assert cache.prefixes.pinned_blocks == len(pinned) * cache.geometry.blocks_per_page
            rooms = [cache.page_list(name[1]) for name in self.reserved if name[0] == model]
            promised = len(pinned.union(*rooms))
            assert cache.pages.promised_blocks == promised * cache.geometry.blocks_per_page
        for model, salt, tokens, pin in self.pinned:
            assert longest(self.pool.caches[model].prefixes, tokens, salt) >= pin.tokens

    def finish(self) -> None:
        """Everybody leaves, and all blocks are there again."""
        for plan, _ in self.flights:
            self.pool.caches[plan.model].abort_forward(plan)
        for name in self.reserved:
            cache = self.account.cache(name)
            cache.pages.unpromise(cache.page_list(name[1]))
            cache.commit_receive(name[1], 0)
        self.flights, self.reserved = [], {}
        for name in list(self.tokens):
            self.do_remove(name)
        for model, pages, _ in self.held:
            self.pool.caches[model].sends.let_go(pages)
        for model, _, _, path in self.pinned:
            self.pool.caches[model].prefixes.unpin(path)
        self.pool.check()
        assert self.pool.available == TOTAL
        for cache in self.pool.caches.values():
            cache.prefixes.evict([])
        assert self.pool.free == TOTAL
