"""Greedy placement (MuxServe, algorithm 1), what moves mend, and replicas of popular models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.reproduce.muxserve.setup import multiplexed
from kvloom.plan.board import Board, improve
from kvloom.plan.cluster import MeshKind
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.search import Order, SearchEffort, best_placement, place
from tests.plan.clusters import check, demand, muxserve, nodes, roofline

ONE, TWO, FOUR, EIGHT = (nodes("A100-80", 8).mesh(n) for n in (1, 2, 4, 8))


def items_of(estimator: Estimator) -> list[Item]:
    return [estimator.item(n, 1) for n in range(len(estimator.demands))]


def largest_first(estimator: Estimator) -> list[Item]:
    return sorted(items_of(estimator), key=lambda item: -estimator.demands[item].compute)


def test_of_meshes_that_gain_alike_the_smallest() -> None:
    estimator = Estimator([demand("a", "llama-7b", 0.1)], roofline)
    kinds = [FOUR, ONE, EIGHT, TWO]
    small = place(estimator, kinds, items_of(estimator), float, small=True, width=8)
    assert [len(unit) for unit in small.units] == [0, 1, 0, 0]
    best = place(estimator, kinds, items_of(estimator), float, small=False, width=8)
    assert best.score >= small.score


def test_the_mesh_with_the_largest_gain() -> None:
    estimator = Estimator([demand("a", "llama-13b", 30.0)], roofline)
    found = place(estimator, [ONE, FOUR, TWO], items_of(estimator), float, small=True, width=8)
    assert [len(unit) for unit in found.units] == [0, 1, 0]


def test_models_are_placed_in_their_order() -> None:
    """Whoever comes first gets the only mesh, which holds but one of them."""
    estimator = Estimator([demand("a", "llama-30b", 0.1), demand("b", "llama-30b", 5.0)], roofline)
    a, b = items_of(estimator)
    orders: list[Order] = [lambda item: -item, lambda item: item]
    found = [place(estimator, [ONE], [a, b], order, small=True, width=8) for order in orders]
    assert [one.units for one in found] == [(frozenset({a}),), (frozenset({b}),)]
    assert [one.left for one in found] == [(b,), (a,)]
    whole = place(estimator, [ONE, ONE], [a, b], float, small=True, width=8)
    assert whole.rank > found[1].rank > found[0].rank


def test_two_of_one_demand_are_on_two_meshes() -> None:
    estimator = Estimator([demand("a", "llama-7b", 4.0)], roofline)
    half = estimator.item(0, 2)
    found = place(estimator, [ONE, ONE, ONE], [half, half], float, small=True, width=8)
    assert sorted(map(len, found.units)) == [0, 1, 1]
    assert place(estimator, [EIGHT], [half, half], float, small=True, width=8).left == (half,)


def test_moves_make_room_for_what_was_left() -> None:
    """Both small ones are on the mesh that alone could hold the large one."""
    estimator = Estimator(
        [demand("a", "llama-65b", 0.1), demand("b", "llama-13b", 0.1), demand("c", "llama-13b", 0.1)],
        roofline,
    )
    large, one, two = items_of(estimator)
    board = Board(estimator, [TWO, ONE], 8, [frozenset({one}), frozenset({two})])
    stuck = board.placement([large])
    assert estimator.unit(TWO, frozenset({one, large})) is None
    mended = improve(estimator, stuck, width=8, budget=1000)
    assert not mended.left
    assert mended.units == (frozenset({large}), frozenset({one, two}))


def test_moves_take_load_off_a_unit_that_is_behind() -> None:
    estimator = Estimator([demand(f"m{n}", "llama-7b", 5.0) for n in range(4)], roofline)
    items = frozenset(items_of(estimator))
    crowded = Board(estimator, [ONE] * 4, 8, [items, frozenset(), frozenset(), frozenset()]).placement(())
    mended = improve(estimator, crowded, width=8, budget=10_000)
    assert mended.answered > 1.5 * crowded.answered
    assert [len(unit) for unit in mended.units] == [1, 1, 1, 1]
    assert improve(estimator, crowded, width=8, budget=0).units == crowded.units


kinds_of = st.lists(st.sampled_from((ONE, ONE, TWO, FOUR)), min_size=1, max_size=5)
wanted = st.lists(
    st.tuples(st.sampled_from(("llama-7b", "llama-13b", "llama-30b")), st.floats(0.0, 20)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(kinds_of, wanted, st.booleans(), st.integers(1, 4))
def test_everything_is_placed_once_or_left(
    kinds: list[MeshKind], pairs: list[tuple[str, float]], small: bool, width: int
) -> None:
    estimator = Estimator([demand(f"m{n}", *pair) for n, pair in enumerate(pairs)], roofline)
    items = items_of(estimator)
    found = place(estimator, kinds, items, float, small=small, width=width)
    cluster = [nodes("A100-80", 8, 5)]
    check(estimator, cluster, found)
    mended = improve(estimator, found, width=width, budget=10_000)
    check(estimator, cluster, mended)
    assert mended.rank >= found.rank
    assert mended.answered <= sum(rate for _, rate in pairs) * (1 + 1e-9)


def test_a_board_knows_what_is_open() -> None:
    estimator = Estimator(
        [demand(f"m{n}", "llama-7b", rate) for n, rate in enumerate((8.0, 2.0, 1.0))], roofline
    )
    busy, calm, new = items_of(estimator)
    board = Board(estimator, [ONE, ONE, ONE, ONE, TWO], 1, [frozenset({busy}), frozenset({calm})])
    assert list(board.open(new)) == [2, 1, 4]  # an empty one, and the one with most to spare
    board.do(((1, frozenset()), (4, frozenset({calm}))))
    assert list(board.open(new)) == [1, 0, 4]
    assert list(board.open(calm)) == [1, 0]
    assert board.gain(((0, frozenset()), (1, frozenset({busy})))) == 0.0


def replicas_of(estimator: Estimator, units: tuple[frozenset[int], ...]) -> dict[str, int]:
    counts = Counter(estimator.demand(item) for unit in units for item in unit)
    return {estimator.demands[n].name: count for n, count in counts.items()}


def test_a_model_that_no_mesh_can_answer_gets_several() -> None:
    cluster = [nodes("A100-80", 1, 6)]
    estimator = Estimator([demand("hot", "llama-7b", 25.0), demand("cold", "llama-7b", 0.1)], roofline)
    found = best_placement(estimator, cluster, SearchEffort())
    assert replicas_of(estimator, found.units)["hot"] > 1
    alone = best_placement(estimator, cluster, SearchEffort(replicas=1))
    assert replicas_of(estimator, alone.units) == {"hot": 1, "cold": 1}
    assert found.answered == pytest.approx(25.1)
    assert alone.answered < 0.5 * found.answered


def test_replicas_that_there_is_no_memory_for_are_given_up() -> None:
    """Either model asks for more than all devices, and there is room for two of them on each."""
    cluster = [nodes("A100-80", 1, 2)]
    demands = [demand(name, "llama-30b", 500.0) for name in "ab"]
    found = best_placement(Estimator(demands, roofline), cluster, SearchEffort())
    assert not found.left
    assert [len(unit) for unit in found.units] == [1, 1]


def test_19_models_on_32_devices() -> None:
    """MuxServe's figure 5, of the paper's units. An estimate takes some tenths of a millisecond at most."""
    cluster = [replace(nodes("A100-80", 8, 4), abilities=multiplexed)]
    demands = muxserve(0.7, 30.0)
    estimator = Estimator(demands, roofline)
    assert SearchEffort.fit(cluster, len(demands)).evaluations == 40_800
    found = best_placement(estimator, cluster, SearchEffort(evaluations=8_000))
    check(estimator, cluster, found)
    assert found.answered == pytest.approx(sum(one.rate for one in demands))
    assert not found.left


def test_what_can_never_be_met_takes_no_longer_than_was_allowed() -> None:
    cluster, demands = [nodes("A100-80", 8, 4)], muxserve(0.9, 200.0)
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort(evaluations=2_000))
    check(estimator, cluster, found)
    assert not found.left
    assert 2_000 <= estimator.spent <= 4_000  # what was begun is ended


def test_100_models_on_1000_devices_of_three_kinds() -> None:
    shapes = ("llama-7b", "llama-7b", "llama-13b", "llama3-8b", "llama-30b")
    demands = [
        demand(f"m{i}", shapes[i % 5], 120.0 * (i + 1) ** -1.1, 200 + 7 * i, 100 + 3 * i) for i in range(100)
    ]
    cluster = [nodes("A100-80", 8, 75), nodes("H100", 8, 30), nodes("L40S", 4, 40)]
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort(evaluations=10_000))
    check(estimator, cluster, found)
    assert not found.left
    assert found.answered == pytest.approx(sum(one.rate for one in demands), rel=0.03)
    assert estimator.evaluations <= 14_000


def test_the_same_plan_each_time() -> None:
    cluster, demands = [nodes("A100-80", 4, 2)], muxserve(1.3, 20.0)[::3]
    first, second = (best_placement(Estimator(demands, roofline), cluster, SearchEffort()) for _ in range(2))
    assert first == second
