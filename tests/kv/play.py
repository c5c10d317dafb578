"""Every way to use a pool, as moves of a play."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvloom.types.errors import OutOfBlocks
from tests.kv.account import CONTEXT, GEOMETRIES, SALTS, SEQUENCES
from tests.kv.stage import Shipping, Stage, text
from tests.kv.transfers import Shelf, address_of, tokens_of
from tests.kv.trees import cached_tokens, longest, nodes

_MODELS = sorted(GEOMETRIES)


class Play(Stage):
    """Each move takes its choices from a source of randomness, does one thing, and checks what it returns;
    where the thing cannot be done now, it does nothing. `check` is for after each."""

    # -- sequences ---------------------------------------------------------------------------------------

    def add(self, random: Random) -> None:
        model, sequence = random.choice(_MODELS), self.account.new()
        if self.full(model):
            with pytest.raises(ValueError, match="no room"):
                self.pool.caches[model].add_sequence(sequence)
            return
        salt = random.choice(SALTS)
        self.pool.caches[model].add_sequence(sequence, salt)
        self.tokens[model, sequence], self.account.salts[model, sequence] = [], salt

    def adopt(self, random: Random) -> None:
        model, prompt = random.choice(_MODELS), self.prompt(random)
        if not self.full(model):
            limit = random.randint(0, len(prompt) + 1)
            name, salt = (model, self.account.new()), random.choice(SALTS)
            self.do_adopt(name, prompt, limit, salt=salt, whole=random.random() < 0.5)

    def remove(self, random: Random) -> None:
        name = self.pick(random)
        if name:
            self.do_remove(name, holds=random.random() < 0.4)

    def fork(self, random: Random) -> None:
        name = self.pick(random)
        if name and not self.full(name[0]):
            child = self.account.new()
            self.account.cache(name).fork_sequence(name[1], child)
            self.tokens[name[0], child] = list(self.tokens[name])
            self.account.salts[name[0], child] = self.account.salts[name]

    # -- the prefix tree ---------------------------------------------------------------------------------

    def keep(self, random: Random) -> None:
        name = self.pick(random)
        if name:
            self.do_keep(name, tail=random.random() < 0.5)
            if random.random() < 0.5:
                self.do_remove(name, holds=random.random() < 0.4)

    def serve(self, random: Random) -> None:
        """From a prompt to what is cached of it, in one go."""
        name, prompt = (random.choice(_MODELS), self.account.new()), self.prompt(random)
        if self.full(name[0]) or GEOMETRIES[name[0]].blocks(len(prompt)) > self.pool.available:
            return
        self.do_adopt(name, prompt, len(prompt) - 1, salt=random.choice(SALTS))
        assert self.do_begin(name[0], [name[1]], [prompt[len(self.tokens[name]) :]])
        self.do_end(*self.flights.pop())
        self.do_keep(name, tail=random.random() < 0.5)
        self.do_remove(name)

    def pin(self, random: Random) -> None:
        model, tokens = random.choice(_MODELS), self.prompt(random)
        tree, salt = self.pool.caches[model].prefixes, random.choice(SALTS)
        cached = longest(tree, tokens, salt)
        path = tree.pin(tokens, salt)
        assert (path.tokens if path else 0) == cached
        if path:
            self.pinned.append((model, salt, tokens, path))

    def unpin(self, random: Random) -> None:
        if self.pinned:
            model, _, _, path = self.pinned.pop(random.randrange(len(self.pinned)))
            self.pool.caches[model].prefixes.unpin(path)

    def evict(self, random: Random) -> None:
        cache = self.pool.caches[random.choice(_MODELS)]
        tokens = tuple(self.prompt(random)) if random.random() < 0.9 else ()
        tree, width = cache.prefixes, cache.geometry.tokens_per_block
        before, cached = cached_tokens(tree), self.pool.cached
        salt = random.choice(SALTS)
        of = salt if salt or tokens else None  # nothing and no salt: all of all salts
        asked = {node for _, node in nodes(tree, of)}
        others = [node for _, node in nodes(tree) if node not in asked]
        others += [node for path, node in nodes(tree, of) if path[: len(tokens)] != tokens[: len(path)]]
        dropped = tree.evict(tokens, salt)
        assert dropped == before - cached_tokens(tree)
        assert self.pool.cached <= cached - dropped // width * cache.geometry.blocks_per_page
        assert {node for _, node in nodes(tree)}.issuperset(others)
        for path, node in nodes(tree, of):
            if path[: len(tokens)] == tokens or path == tokens[: len(path)]:
                assert node.children or cache.pages.refs[node.page] > 1

    # -- forwards ----------------------------------------------------------------------------------------

    def begin(self, random: Random) -> None:
        model = random.choice(_MODELS)
        mine = [s for _, s in self.idle(model) if len(self.tokens[model, s]) < CONTEXT]
        if mine:
            chosen = random.sample(mine, random.randint(1, min(4, len(mine))))
            self.do_begin(model, chosen, self.more(random, model, chosen, 20))

    def more(self, random: Random, model: str, chosen: Sequence[int], most: int) -> list[list[int]]:
        """What each of the sequences goes on with."""
        found: list[list[int]] = []
        for sequence in chosen:
            start = len(self.tokens[model, sequence])
            found.append(text(random, start, start + random.randint(1, min(most, CONTEXT - start))))
        return found

    def admit(self, random: Random) -> None:
        """As the engine does: what fits without anything cached fits with it."""
        model = random.choice(_MODELS)
        cache = self.pool.caches[model]
        prompts = [self.prompt(random) for _ in range(random.randint(1, 3))]
        prompts = prompts[: SEQUENCES - len(cache.sequences)]
        begun = [s for _, s in self.idle(model) if len(self.tokens[model, s]) < CONTEXT]
        begun = begun[: random.randint(0, 1)]
        new = self.more(random, model, begun, 12)
        need = sum(cache.blocks_for(s, len(tokens)) for s, tokens in zip(begun, new, strict=True))
        need += sum(cache.geometry.blocks(len(prompt)) for prompt in prompts)
        if need > self.pool.available or not prompts:
            return
        names = [(model, self.account.new()) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.do_adopt(name, prompt, len(prompt) - 1, salt=random.choice(SALTS))
        new += [prompt[len(self.tokens[name]) :] for name, prompt in zip(names, prompts, strict=True)]
        assert self.do_begin(model, [*begun, *(sequence for _, sequence in names)], new)

    def end(self, random: Random) -> None:
        if self.flights:
            self.do_end(*self.flights.pop(random.randrange(len(self.flights))))

    def abort(self, random: Random) -> None:
        if self.flights:
            plan, _ = self.flights.pop(random.randrange(len(self.flights)))
            self.pool.caches[plan.model].abort_forward(plan)

    # -- receiving and sending ---------------------------------------------------------------------------

    def reserve(self, random: Random) -> None:
        name = self.pick(random)
        if name is None or len(self.tokens[name]) == CONTEXT:
            return
        start, cache = len(self.tokens[name]), self.account.cache(name)
        new = self.more(random, name[0], [name[1]], 20)[0]
        try:
            blocks = cache.prepare_receive(name[1], len(new))
        except (OutOfBlocks, ValueError):
            return
        pages = cache.page_list(name[1])[start // cache.geometry.tokens_per_block :]
        assert (blocks == cache.pages.map[pages]).all()
        cache.pages.promise(cache.page_list(name[1]))
        self.reserved[name] = new
        self.account.receive(name, new)

    def settle(self, random: Random) -> None:
        if not self.reserved:
            return
        name = random.choice(sorted(self.reserved))
        tokens, cache = self.reserved.pop(name), self.account.cache(name)
        cache.pages.unpromise(cache.page_list(name[1]))
        arrived = random.choice([0, len(tokens), random.randint(0, len(tokens))])
        cache.commit_receive(name[1], arrived)
        self.tokens[name] += tokens[:arrived]

    def ship(self, random: Random) -> None:
        name = self.pick(random, ships=False)
        if name is None:
            return
        cache, length = self.account.cache(name), len(self.tokens[name])
        first, end = random.randint(0, length), length + random.choice([0, 1, random.randint(0, 30)])
        begin = random.randint(first, length)
        if begin == end:
            return
        address = address_of(cache.geometry, first, end, name[0])
        shipping = self.shipping[name] = Shipping(length, end)
        if begin < length:
            send = cache.sends.planned(name[1], Shelf(address, begin, end), length)
            places = self.account.places(name, begin, length)
            found = tokens_of(send, cache.geometry, address.first_page)
            assert found == dict(zip(range(begin, length), places, strict=True))
            shipping.read = self.account.contents(name, begin, length)
        if end > length:
            cache.sends.mark(name[1], Shelf(address, length, end))

    def hold(self, random: Random) -> None:
        name = self.pick(random)
        if name:
            begin, end = sorted(random.randint(0, len(self.tokens[name])) for _ in range(2))
            self.do_hold(name, begin, end)

    def let_go(self, random: Random) -> None:
        if self.held:
            model, pages, _ = self.held.pop(random.randrange(len(self.held)))
            self.pool.caches[model].sends.let_go(pages)


OFTEN = {
    **{"serve": 6, "admit": 4, "begin": 4, "end": 8, "remove": 3, "let_go": 3, "settle": 2, "unpin": 2},
    **dict.fromkeys(["add", "adopt", "fork", "keep", "pin", "evict", "abort"], 1),
    **dict.fromkeys(["reserve", "ship", "hold"], 1),
}
