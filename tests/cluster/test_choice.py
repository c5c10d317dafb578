"""Which request goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.cluster.policies.dispatch import pair
from kvloom.engine.freeness import Thresholds, freeness
from kvloom.engine.migration import LEAST_LEFT, MigrationCandidate, choose
from kvloom.types.load import LevelLoad, UnitLoad
from kvloom.types.request import Level
from kvloom.types.service import Pair
from tests.cluster.loads import model, unit, unit_loads

EMPTY = unit(model())
HIGH, HIGHER = Level(-1, 1600), Level(-2, 3200)


def candidate(request: str, *lengths: int, left: int = 1000, model: str = "m") -> MigrationCandidate:
    return MigrationCandidate(request, model, lengths, left)


def chosen(*candidates: MigrationCandidate, to: UnitLoad = EMPTY, floor: float = 0.0) -> str | None:
    one = choose(candidates, to, floor=floor)
    return None if one is None else one.request


def test_low_priority_first_then_the_shortest() -> None:
    short, long = candidate("short", 100), candidate("long", 900)
    assert chosen(long, short) == "short"
    assert chosen(long, replace(short, level=HIGH)) == "long"
    assert chosen(replace(long, level=HIGH), replace(short, level=HIGHER)) == "long"
    assert chosen(replace(long, level=HIGH), replace(short, level=HIGH)) == "short"
    assert chosen(candidate("two choices", 60, 60), short) == "short"
    assert chosen(short, candidate("as short", 100)) == "short"


def test_what_does_not_go() -> None:
    one = candidate("one", 100)
    assert chosen(replace(one, left=LEAST_LEFT - 1)) is None
    assert chosen(replace(one, left=LEAST_LEFT)) == "one"
    assert chosen(replace(one, model="unknown")) is None
    assert chosen(one, to=unit(model(), draining=True)) is None
    assert chosen() is None


def test_only_what_the_destination_holds() -> None:
    room = unit(model(1, 16 * 990))  # 10 of 1,000 pages are free
    assert chosen(candidate("long", 161), candidate("fits", 160), to=room) == "fits"
    assert chosen(candidate("long", 161), to=room) is None
    assert chosen(candidate("pages", *[1] * 11), to=room) is None
    assert chosen(candidate("fits", 160), to=unit(model(1, 16 * 990, waiting=1, head_blocks=1))) is None


def test_what_choices_share_counts_once() -> None:
    """64 tokens are 4 pages; of three choices 5, 6 and 7 pages each."""
    one = replace(candidate("one", 80, 96, 112), shared=64)
    assert one.tokens == 64 + 16 + 32 + 48
    assert one.blocks(model()) == 4 + 1 + 2 + 3
    assert replace(one, shared=70).blocks(model()) == 10, "a page that is shared in part is each one's own"
    assert candidate("alone", 80).blocks(model(size=3)) == replace(candidate("alone", 80), shared=64).blocks(
        model(size=3)
    )
    room = unit(model(1, 16 * 990))
    assert chosen(one, to=room) == "one"
    assert chosen(replace(one, lengths=(80, 96, 128)), to=room) is None
    assert chosen(one, candidate("longer", 161)) == "one"


def test_nor_what_would_come_back_at_once() -> None:
    room = unit(model(1, 16 * 900))
    assert chosen(candidate("one", 16 * 40), to=room, floor=480) == "one"  # 60 pages for two sequences
    assert chosen(candidate("one", 16 * 41), to=room, floor=480) is None


def test_headroom_needs_its_room_too() -> None:
    one = replace(candidate("one", 160), level=HIGH)  # 100 blocks of headroom, 10 of its own
    assert chosen(one, to=unit(model(1, 16 * 890))) == "one"
    assert chosen(one, to=unit(model(1, 16 * 891))) is None
    mate = LevelLoad(priority=-1, headroom=1600, running=1)
    assert chosen(one, to=unit(model(1, 16 * 890, levels=(mate,)))) == "one"  # it is there already


@given(
    unit_loads(),
    st.lists(
        st.builds(
            MigrationCandidate,
            request=st.text("ab", min_size=1, max_size=4),
            model=st.sampled_from(["m", "m1", "m2"]),
            lengths=st.lists(st.integers(1, 900), min_size=1, max_size=3).map(tuple),
            left=st.integers(0, 40),
            level=st.sampled_from([None, HIGH, HIGHER]),
        ),
        max_size=8,
    ),
)
def test_the_order_does_not_matter(destination: UnitLoad, some: list[MigrationCandidate]) -> None:
    def rank(one: MigrationCandidate | None) -> object:
        return one and (one.level.headroom if one.level else 0, sum(one.lengths))

    one = choose(some, destination)
    assert rank(one) == rank(choose(some[::-1], destination))
    if one:
        assert one.left >= LEAST_LEFT
        assert not destination.draining


BAND = Thresholds(out=32, into=64)
lengths = st.lists(st.integers(1, 2000), max_size=12)


def of(requests: list[int]) -> UnitLoad:
    """A pool of 200 pages; what does not fit waits."""
    running: list[int] = []
    for at, length in enumerate(requests):
        if sum(-(-one // 16) for one in running) + -(-length // 16) > 200:
            waiting = [-(-one // 16) for one in requests[at:]]
            break
        running.append(length)
    else:
        waiting = []
    return unit(
        model(
            len(running),
            used_blocks=sum(-(-one // 16) for one in running),
            waiting=len(waiting),
            head_blocks=waiting[0] if waiting else 0,
            waiting_blocks=sum(waiting),
        ),
        blocks=200,
    )


@given(st.lists(lengths, min_size=2, max_size=5))
def test_no_request_is_handed_to_and_fro(fleet: list[list[int]]) -> None:
    """While nothing comes, grows or ends, moves come to an end, and no request goes twice."""
    units = {f"u{at}": list(enumerate(some, 100 * at)) for at, some in enumerate(fleet)}
    moves: Counter[int] = Counter()
    pairs: tuple[Pair, ...] = ()
    for _ in range(100):
        loads = {name: of([length for _, length in some]) for name, some in units.items()}
        pairs = pair(loads, {name: freeness(load) for name, load in loads.items()}, pairs, BAND)
        moved = False
        for one in pairs:
            running = units[one.source][: loads[one.source].running]
            found = choose(
                [candidate(str(number), length) for number, length in running],
                loads[one.destination],
                floor=BAND.out,
            )
            if found:
                [went] = [request for request in running if str(request[0]) == found.request]
                units[one.source].remove(went)
                units[one.destination].append(went)
                moves[went[0]] += 1
                moved = True
        if not moved:
            break
    assert not moved
    assert all(count == 1 for count in moves.values())


@pytest.mark.parametrize("floor", [0.0, 24.0])
def test_an_idle_unit_takes_what_leaves_it_that_free(floor: float) -> None:
    small = unit(model(), blocks=10)
    assert chosen(candidate("one", 16 * 8), to=small, floor=floor) == "one"
    assert chosen(candidate("one", 16 * 11), to=small, floor=floor) is None
