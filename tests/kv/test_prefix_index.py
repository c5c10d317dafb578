"""The router's index against a plain dict of prefixes: what was sent where, and what units told."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.kv.prefix_feed import page_name, root_name
from kvloom.kv.prefix_index import CHUNK, ROUNDS, PrefixIndex
from kvloom.types.verbs import CacheChanges
from tests.examples import examples

UNITS = ["a", "b", "c"]
WIDTHS = {"a": 4, "b": 4, "c": 6}
SALTS = ["", "alice"]
Key = tuple[str, str, int, tuple[int, ...]]  # model, salt, width, the tokens up to a page's end

# few tokens, and few ways to go on after each page, so that prompts share much
prompts = st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 7)).map(
    lambda pair: [kind for kind in pair[0] for _ in range(4)] + [9] * pair[1]
)
contexts = st.tuples(st.sampled_from("mn"), st.sampled_from(SALTS), prompts)


def pages(model: str, salt: str, prompt: list[int], width: int) -> list[Key]:
    return [(model, salt, width, tuple(prompt[:end])) for end in range(width, len(prompt) + 1, width)]


def name(key: Key) -> bytes:
    model, salt, width, tokens = key
    found = root_name(model, width, salt)
    for at in range(0, len(tokens), width):
        found = page_name(found, tokens[at : at + width])
    return found


@dataclasses.dataclass
class Known:
    """What a plain twin knows of one unit."""

    noted: dict[Key, int] = dataclasses.field(default_factory=dict)  # the round that forgets it
    told: set[Key] = dataclasses.field(default_factory=set)
    rounds: int = 0


class IndexAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.twin = {unit: Known() for unit in UNITS}
        self.asked: list[tuple[str, str, list[int]]] = []

    @rule(context=contexts, unit=st.sampled_from(UNITS), cut=st.integers(0, 9))
    def note(self, context: tuple[str, str, list[int]], unit: str, cut: int) -> None:
        model, salt, prompt = context
        end, known = max(0, len(prompt) - cut), self.twin[unit]
        self.index.note(model, prompt, unit, salt, end=end, width=WIDTHS[unit])
        for key in pages(model, salt, prompt[:end], WIDTHS[unit]):
            known.noted[key] = known.rounds + ROUNDS
        self.asked.append(context)

    @rule(context=contexts, unit=st.sampled_from(UNITS))
    def drop(self, context: tuple[str, str, list[int]], unit: str) -> None:
        model, salt, prompt = context
        self.index.drop(model, prompt, unit, salt, width=WIDTHS[unit])
        for key in pages(model, salt, prompt, WIDTHS[unit]):
            self.twin[unit].noted.pop(key, None)

    @rule(context=contexts, unit=st.sampled_from(UNITS), whole=st.booleans(), cut=st.integers(0, 5))
    def tell(self, context: tuple[str, str, list[int]], unit: str, whole: bool, cut: int) -> None:
        """A unit has computed a prompt, and dropped the end of it: either may be unknown to the index."""
        model, salt, prompt = context
        path, known = pages(model, salt, prompt, WIDTHS[unit]), self.twin[unit]
        come, gone = path[: max(0, len(path) - cut)], path[max(0, len(path) - cut) :]
        beyond = {
            one for one in known.told if gone and one[:3] == gone[0][:3] and len(one[3]) >= len(gone[0][3])
        }
        gone += [one for one in beyond if one not in gone and one[3][: len(gone[0][3])] == gone[0][3]]
        if whole:
            known.told.clear()
            gone = []
        self.index.apply(
            unit,
            CacheChanges(
                life="x",
                version=1,
                whole=whole,
                come=b"".join(map(name, come)),
                gone=b"".join(map(name, gone)),
            ),
        )
        known.told = (known.told | set(come)) - set(gone)
        known.rounds += 1
        for key in gone:
            known.noted.pop(key, None)
        known.noted = {key: until for key, until in known.noted.items() if until > known.rounds}
        self.asked.append(context)

    @rule(unit=st.sampled_from(UNITS), rounds=st.integers(1, ROUNDS))
    def rest(self, unit: str, rounds: int) -> None:
        known = self.twin[unit]
        for _ in range(rounds):
            self.index.apply(unit, CacheChanges(life="x", version=1))
        known.rounds += rounds
        known.noted = {key: until for key, until in known.noted.items() if until > known.rounds}

    @rule(unit=st.sampled_from(UNITS))
    def forget(self, unit: str) -> None:
        self.index.forget(unit)
        self.twin[unit] = Known()

    @rule(context=contexts)
    def match(self, context: tuple[str, str, list[int]]) -> None:
        self.check(*context)

    @invariant()
    def finds_what_the_twin_knows(self) -> None:
        for context in self.asked[-4:]:
            self.check(*context)
        held = {key for known in self.twin.values() for key in (*known.noted, *known.told)}
        assert len(self.index) == len(held)

    def check(self, model: str, salt: str, prompt: list[int]) -> None:
        for width in (4, 6):
            expected: dict[str, int] = {}
            for unit in UNITS:
                known, depth = self.twin[unit], 0
                for key in pages(model, salt, prompt, width):
                    if key not in known.told and key not in known.noted:
                        break
                    depth = len(key[3])
                if depth:
                    expected[unit] = depth
            assert self.index.match(model, prompt, salt, width=width) == expected


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, derandomize=True
)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(contexts, st.sampled_from(UNITS)), max_size=30), st.integers(1, 12))
def test_it_is_bounded_and_the_latest_prompt_is_whole(
    held: list[tuple[tuple[str, str, list[int]], str]], most: int
) -> None:
    index = PrefixIndex(most_pages=most)
    for (model, salt, prompt), unit in held:
        index.note(model, prompt, unit, salt, width=4)
        assert len(index) <= most
        found = index.match(model, prompt, salt, width=4)
        assert found.get(unit, 0) == min(len(prompt) // 4, most) * 4


@pytest.mark.parametrize("told", [False, True])
def test_a_units_notes_are_bounded_too(told: bool) -> None:
    index = PrefixIndex(most_notes=3)
    for kind in range(8):
        prompt = [kind] * CHUNK * 2
        if told:
            keys = pages("m", "", prompt, CHUNK)
            index.apply("a", CacheChanges(life="x", version=1, come=b"".join(map(name, keys))))
        index.note("m", prompt, "a")
    assert len(index) == (16 if told else 3)
    assert index.match("m", [0] * CHUNK * 2) == ({"a": CHUNK * 2} if told else {})


def test_a_prompt_of_32000_tokens_costs_each_page_one_name_and_few_look_ups() -> None:
    index, prompt, pages_of_it = PrefixIndex(), list(range(32_000)), 2_000
    for unit in UNITS:
        index.note("m", prompt, unit)
    index.operations = 0
    again = list(prompt)
    for _ in range(4):  # a request asks about its prompt several times
        assert index.match("m", again) == dict.fromkeys(UNITS, 32_000)
    index.note("m", again, "a")
    assert index.operations == 6 * pages_of_it
    index.operations = 0
    assert index.match("m", [-1, *prompt[1:]]) == {}
    assert index.operations == 2
