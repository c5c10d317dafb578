"""A plain account, beside a pool, of what every page holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.geometry import Geometry
from kvloom.types.job import ForwardPlan

GEOMETRIES = {
    "wide": Geometry(layers=3, kv_heads=4, head_dim=16, itemsize=4, block_bytes=1024),  # 8 tokens, 12 blocks
    "tall": Geometry(layers=5, kv_heads=1, head_dim=24, itemsize=2, block_bytes=1024),  # 10 tokens, 5 blocks
}
TOTAL = 130
CONTEXT = 60
SALTS = ("", "", "alice", "bob")
SEQUENCES = 6

Name = tuple[str, int]  # a model's sequence
Contents = dict[tuple[int, int], int]  # by page and offset


def after(code: int, tokens: Sequence[int]) -> list[int]:
    """K and V of a token depend on all tokens up to it: one number for each, after those that make `code`."""
    found: list[int] = []
    for token in tokens:
        code = hash((code, token))
        found.append(code)
    return found


class Account:
    """tokens: the valid tokens of every sequence. written: what stands in each (model, page, offset).

    salts: those of the sequences. Content follows the salt and the tokens, so that a wrong page shared by
    anyone shows, also one of the same tokens under another salt, and a right one does not.
    """

    def __init__(self) -> None:
        self.pool = Pool(
            TOTAL, GEOMETRIES, max_sequences=SEQUENCES, max_tokens=dict.fromkeys(GEOMETRIES, CONTEXT)
        )
        self.tokens: dict[Name, list[int]] = {}
        self.salts: dict[Name, str] = {}
        self.written: dict[str, Contents] = {model: {} for model in GEOMETRIES}
        self._next = 0

    def new(self) -> int:
        self._next += 1
        return self._next

    def cache(self, name: Name) -> ModelCache:
        return self.pool.caches[name[0]]

    def fill(self, plan: ForwardPlan, new: Sequence[Sequence[int]]) -> None:
        """A forward has copied its pages and written `new` to its sequences."""
        written = self.written[plan.model]
        for copy in plan.copies:
            for offset in range(copy.tokens):
                written[copy.target, offset] = written[copy.source, offset]
        codes: list[int] = []
        for sequence, tokens in zip(plan.sequences, new, strict=True):
            codes += self.codes((plan.model, sequence), tokens)
        for page, offset, code in zip(plan.slot_page, plan.slot_offset, codes, strict=True):
            written[int(page), int(offset)] = code

    def receive(self, name: Name, tokens: Sequence[int]) -> None:
        """A peer writes `tokens` into the room that is reserved."""
        start = len(self.tokens[name])
        places = self.places(name, start, start + len(tokens))
        self.written[name[0]].update(zip(places, self.codes(name, tokens), strict=True))

    def codes(self, name: Name, new: Sequence[int]) -> list[int]:
        """What `new` tokens after the valid ones are."""
        return after(hash(self.salts[name]), [*self.tokens[name], *new])[len(self.tokens[name]) :]

    def places(self, name: Name, begin: int, end: int) -> list[tuple[int, int]]:
        """Page and offset of each of the tokens [begin, end)."""
        width, pages = GEOMETRIES[name[0]].tokens_per_block, self.cache(name).page_list(name[1])
        return [(pages[p // width], p % width) for p in range(begin, end)]

    def contents(self, name: Name, begin: int, end: int) -> Contents:
        """What the tokens [begin, end) are, where they stand."""
        codes = after(hash(self.salts[name]), self.tokens[name][:end])[begin:]
        return dict(zip(self.places(name, begin, end), codes, strict=True))

    def check_contents(self, name: Name) -> None:
        """The sequence's pages hold its tokens."""
        assert self.cache(name).length(name[1]) == len(self.tokens[name])
        self.check_written(name[0], self.contents(name, 0, len(self.tokens[name])))

    def check_written(self, model: str, contents: Contents) -> None:
        written = self.written[model]
        wrong = {place: code for place, code in contents.items() if written[place] != code}
        assert not wrong, f"{model}: (page, offset) {sorted(wrong)} hold other tokens"
