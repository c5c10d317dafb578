"""The router's index against a plain list of what was sent where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.kv.prefix_index import CHUNK, PrefixIndex

UNITS = ["a", "b", "c"]
# few tokens, and few ways to go on after each chunk, so that prompts share much
chunks = st.lists(st.integers(0, 2), max_size=6).map(
    lambda kinds: [kind for kind in kinds for _ in range(CHUNK)]
)
prompts = st.tuples(chunks, st.integers(0, CHUNK + 3)).map(lambda pair: pair[0] + [9] * pair[1])
notes = st.tuples(st.sampled_from("mn"), prompts, st.sampled_from(UNITS))
SALTS = ["", "alice", "bob"]


def whole_chunks_in_common(one: list[int], other: list[int]) -> int:
    same = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return same // CHUNK * CHUNK


def plain_match(held: list[tuple[str, list[int], str]], model: str, prompt: list[int]) -> dict[str, int]:
    longest: dict[str, int] = {}
    for noted_model, noted, unit in held:
        if noted_model == model:
            longest[unit] = max(longest.get(unit, 0), whole_chunks_in_common(noted, prompt))
    return {unit: tokens for unit, tokens in longest.items() if tokens}


@given(st.lists(notes, max_size=12), notes, st.sampled_from(UNITS))
def test_it_finds_what_was_noted(
    held: list[tuple[str, list[int], str]], asked: tuple[str, list[int], str], gone: str
) -> None:
    index = PrefixIndex()
    for model, prompt, unit in held:
        index.note(model, prompt, unit)
    model, prompt, _ = asked
    assert index.match(model, prompt) == plain_match(held, model, prompt)
    index.forget(gone)
    assert index.match(model, prompt) == plain_match([one for one in held if one[2] != gone], model, prompt)


@given(st.lists(notes, max_size=30), st.integers(1, 12))
def test_it_is_bounded_and_never_finds_more(held: list[tuple[str, list[int], str]], most: int) -> None:
    index = PrefixIndex(most)
    for at, (model, prompt, unit) in enumerate(held):
        index.note(model, prompt, unit)
        assert len(index) <= most * len(UNITS)
        found = index.match(model, prompt)
        assert found.get(unit, 0) == min(len(prompt) // CHUNK, most) * CHUNK  # the latest is whole
        true = plain_match(held[: at + 1], model, prompt)
        assert all(tokens <= true[unit] for unit, tokens in found.items())


@given(st.lists(notes, max_size=30), st.integers(1, 8))
def test_the_longest_unused_goes_first(held: list[tuple[str, list[int], str]], most: int) -> None:
    """Leaves before what they hang on: a unit's chunks are, at every time, the last `most` that were used."""
    index = PrefixIndex(most)
    used: dict[str, list[tuple[str, tuple[int, ...]]]] = {unit: [] for unit in UNITS}
    for model, prompt, unit in held:
        index.note(model, prompt, unit)
        for end in range(len(prompt) // CHUNK * CHUNK, 0, -CHUNK):
            node = (model, tuple(prompt[:end]))
            used[unit] = [one for one in used[unit] if one != node] + [node]
        del used[unit][:-most]
    assert len(index) == sum(len(nodes) for nodes in used.values())
    for model, prompt, _ in held:
        found = index.match(model, prompt)
        for unit in UNITS:
            ends = [
                end
                for end in range(CHUNK, len(prompt) + 1, CHUNK)
                if (model, tuple(prompt[:end])) in used[unit]
            ]
            assert found.get(unit, 0) == len(ends) * CHUNK == max(ends, default=0)


@given(st.lists(st.tuples(st.sampled_from(SALTS), notes), max_size=12), notes)
def test_each_salt_has_an_index_of_its_own(
    held: list[tuple[str, tuple[str, list[int], str]]], asked: tuple[str, list[int], str]
) -> None:
    index = PrefixIndex()
    for salt, (model, prompt, unit) in held:
        index.note(model, prompt, unit, salt)
    model, prompt, _ = asked
    for salt in SALTS:
        mine = [note for noted, note in held if noted == salt]
        assert index.match(model, prompt, salt) == plain_match(mine, model, prompt)
