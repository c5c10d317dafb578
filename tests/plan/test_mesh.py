"""Cuts of a cluster are all there are, each once, and each has a node for every mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.plan.cluster import (
    CPU,
    Cut,
    Nodes,
    cuts,
    fits,
    groups,
    homes,
    mesh_kinds,
    meshes,
    node_names,
    worthwhile,
)
from tests.plan.clusters import nodes


def node_patterns(gpus: int, sizes: list[int]) -> set[tuple[int, ...]]:
    """All ways to cut one node, as sizes in falling order; the rest, too small for any size, stays idle."""
    if gpus < min(sizes):
        return {()}
    return {
        tuple(sorted((size, *rest), reverse=True))
        for size in sizes
        if size <= gpus
        for rest in node_patterns(gpus - size, sizes)
    }


def by_patterns(one: Nodes, sizes: list[int]) -> set[Cut]:
    """The same cuts as MuxServe finds them: patterns of a node, combined with repetition."""
    found = set()
    for combination in combinations_with_replacement(sorted(node_patterns(one.gpus, sizes)), one.count):
        counts = Counter(size for pattern in combination for size in pattern)
        found.add(tuple(sorted(counts.items(), reverse=True)))
    return found


def test_muxserves_ten_patterns_and_715_combinations() -> None:
    assert len(node_patterns(8, [8, 4, 2, 1])) == 10
    assert len(node_patterns(4, [4, 2, 1])) == 4
    found = list(cuts(nodes("A100-80", 8, 4), {8, 4, 2, 1}))
    assert len(found) == len(set(found)) == 165
    assert set(found) == by_patterns(nodes("A100-80", 8, 4), [8, 4, 2, 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.data())
def test_they_are_those_of_all_patterns(gpus: int, count: int, data: st.DataObject) -> None:
    one = nodes("A100-80", gpus, count)
    powers = [size for size in one.sizes if size & (size - 1) == 0]
    sizes = data.draw(st.sampled_from([powers[n:] for n in range(len(powers))]))
    assert set(cuts(one, sizes)) == by_patterns(one, sizes)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4))
def test_every_cut_fits_and_has_its_nodes(gpus: int, count: int) -> None:
    one = nodes("A100-80", gpus, count)
    found = list(cuts(one, one.sizes))
    assert len(found) == len(set(found))
    for cut in found:
        assert fits(one, cut)
        kinds = meshes([one], (cut,))
        used = Counter[str]()
        for kind, home in zip(kinds, homes([one], kinds), strict=True):
            used[home.node] += kind.gpus
        assert max(used.values()) <= gpus
        assert sum(used.values()) == one.total  # with meshes of one device nothing stays idle
    more = ((one.sizes[0], count + 1),)
    assert not fits(one, more)


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_meshes_of_a_node_share_no_device(gpus: int, count: int, data: st.DataObject) -> None:
    one = nodes("A100-80", gpus, count)
    kinds = meshes([one], (data.draw(st.sampled_from(list(cuts(one, one.sizes)))),))
    taken = [
        (home.node, home.first + n)
        for kind, home in zip(kinds, homes([one], kinds), strict=True)
        for n in range(kind.gpus)
    ]
    assert len(set(taken)) == len(taken) == one.total
    assert max(number for _, number in taken) < gpus


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        ([nodes("A10", 2)], [""]),
        ([nodes("A10", 2, 2)], ["node-0", "node-1"]),
        ([replace(nodes("A10", 2), names=("a",))], ["a"]),
        (
            [nodes("A10", 2), replace(nodes("H100", 1, 2), names=("a", "b")), Nodes(CPU, 1 << 30, 4, 1)],
            ["node-0", "a", "b", "node-3"],
        ),
    ],
)
def test_nodes_have_names_where_there_are_several(cluster: list[Nodes], names: list[str]) -> None:
    assert node_names(cluster) == names
    kinds = [kind for one in cluster for kind in [one.mesh(one.gpus)] * one.count]
    assert sorted(home.node for home in homes(cluster, kinds)) == sorted(names)
    assert {home.first for home in homes(cluster, kinds)} == {0}


def test_a_cut_of_odd_nodes() -> None:
    six = nodes("A100-80", 6, 2)
    assert six.sizes == (6, 4, 2, 1)
    assert ((6, 1), (4, 1), (2, 1)) in set(cuts(six, six.sizes))
    assert fits(six, ((4, 2), (2, 2)))
    assert not fits(six, ((4, 3),))
    assert not fits(six, ((6, 1), (4, 2)))


def test_several_kinds_of_nodes() -> None:
    cluster = [nodes("A100-80", 2, 1), nodes("A10", 2, 1), Nodes(CPU, 1 << 30, 2, 1)]
    found = groups(cluster, set(mesh_kinds(cluster)), 100)
    assert found is not None
    assert len(found) == 8
    assert groups(cluster, set(mesh_kinds(cluster)), 7) is None
    large = [nodes("A100-80", 8, 1000)]
    assert groups(large, set(mesh_kinds(large)), 10_000) is None  # and that at once


def test_sizes_that_no_model_can_use_are_not_cut() -> None:
    one = nodes("A100-80", 8, 2)
    found = groups([one], {one.mesh(4), one.mesh(2)}, 1000)
    assert found is not None
    assert {size for (cut,) in found for size, _ in cut} == {4, 2}


@pytest.mark.parametrize(
    ("items", "needed", "left"), [(2, 1, {1, 2}), (1, 1, {1}), (8, 8, {1, 2, 3, 4, 5, 6, 7, 8})]
)
def test_what_is_worth_a_try(items: int, needed: int, left: set[int]) -> None:
    one = nodes("A100-80", 8)
    found = groups([one], set(mesh_kinds([one])), 100)
    assert found is not None
    kept = worthwhile(found, items, needed)
    if needed == 8:
        assert kept == [(((8, 1),),)]
    else:
        assert {len(meshes([one], group)) for group in kept} == left


def test_where_every_group_has_more_meshes_than_items_the_fewest_are_kept() -> None:
    one = nodes("A100-80", 8, 3)
    found = groups([one], set(mesh_kinds([one])), 100)
    assert found is not None
    assert worthwhile(found, 1, 1) == [(((8, 3),),)]
