"""What is said of a demand that cannot be met is true: what would be enough is enough."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvloom.plan.cluster import CPU, Nodes
from kvloom.plan.estimate import Estimator
from kvloom.plan.explain import check_each, more_devices, shortfalls
from kvloom.plan.planner import plan_placement
from kvloom.types.errors import ConfigError
from tests.plan.clusters import demand, formula, nodes, roofline


def refused(cluster: list[Nodes], *demands: tuple[str, float]) -> str:
    estimator = Estimator([demand(f"m{n}", *one) for n, one in enumerate(demands)], roofline)
    with pytest.raises(ConfigError) as error:
        plan_placement(estimator, cluster)
    assert "\n" not in error.value.message
    return error.value.message


def test_a_model_that_no_mesh_can_hold() -> None:
    said = refused([nodes("A10", 4)], ("llama-7b", 1.0), ("llama-65b", 1.0))
    assert said.startswith(
        "model 'm1' needs 123.4 GiB for weights, activations and one request; the largest mesh"
    )
    assert said.endswith("4 × A10, has 84.94 GiB; 8 × A10 in a node would be enough")
    plan_placement(Estimator([demand("m1", "llama-65b", 1.0)], roofline), [nodes("A10", 8)])


def test_devices_that_its_heads_cannot_be_split_over_do_not_count() -> None:
    said = refused([Nodes("A10", 10**10, 8, 1)], ("llama-30b", 1.0))  # 52 heads
    assert "4 × A10, has 35.39 GiB; 13 × A10 in a node would be enough" in said


def test_models_that_have_no_room_beside_each_other() -> None:
    said = refused([nodes("A100-80", 1)], ("llama-13b", 1.0), ("llama-13b", 1.0), ("llama-13b", 1.0))
    assert "no memory is left for m" in said
    assert "the cluster has 70.78 GiB; 1 more A100-80 would be enough" in said
    estimator = Estimator([demand(f"m{n}", "llama-13b", 1.0) for n in range(3)], roofline)
    assert not plan_placement(estimator, [nodes("A100-80", 1, 2)]).left


def test_a_core_may_hold_any_model_that_fits_its_node() -> None:
    cores = [Nodes(CPU, 10 << 30, 4, 1)]
    check_each(Estimator([demand("a", "llama-7b", 1.0)], formula), cores)
    with pytest.raises(ConfigError, match="14 × cpu in a node would be enough"):
        check_each(Estimator([demand("a", "llama-65b", 1.0)], formula), cores)


def test_memory_that_is_short() -> None:
    estimator = Estimator([demand("a", "llama-13b", 5.6)], roofline)
    found = shortfalls(estimator, plan_placement(estimator, [nodes("A100-80", 1)]))
    (one,) = found
    assert (one.model, one.bound, one.rate) == ("a", "memory", 5.6)
    assert one.wanted > one.pool
    assert (
        f"a on unit-0: {one.answered:.3g} of 5.6 requests/s, {5.6 - one.answered:.3g} missing: its KV pool of"
        in one.text
    )
    # with that much memory it is met
    more = nodes("A100-80", 1).memory + int((one.wanted - one.pool) / 0.95) + 1
    roomy = Estimator([demand("a", "llama-13b", 5.6)], roofline)
    assert plan_placement(roomy, [Nodes("A100-80", more, 1, 1)]).answered == pytest.approx(5.6)


def test_a_demand_of_thousands_is_written_out() -> None:
    estimator = Estimator([demand("a", "llama-7b", 2000.0)], roofline)
    (one,) = shortfalls(estimator, plan_placement(estimator, [nodes("A100-80", 1)]))
    assert " of 2,000 requests/s, 1," in one.text
    assert "e+" not in one.text


def test_compute_that_is_short() -> None:
    estimator = Estimator([demand("a", "llama-7b", 50.0, 1000, 10)], roofline)
    cluster = [nodes("A100-80", 1)]
    found = shortfalls(estimator, plan_placement(estimator, cluster))
    (one,) = found
    assert one.bound == "compute"
    assert f"the compute of 1 × A100-80 is used up; {one.meshes} such meshes instead of one" in one.text


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(("llama-7b", "llama-13b", "llama3-8b")), st.floats(0.5, 40)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from((("A100-80", 1), ("A100-80", 2), ("H100", 2))),
)
def test_what_would_be_enough_is_enough(pairs: list[tuple[str, float]], kind: tuple[str, int]) -> None:
    demands = [demand(f"m{n}", *pair) for n, pair in enumerate(pairs)]
    estimator = Estimator(demands, roofline)
    try:
        found = shortfalls(estimator, plan_placement(estimator, [nodes(*kind)]))
    except ConfigError:
        assume(False)
        return
    assert [one.rate - one.answered for one in found] == sorted(
        (one.rate - one.answered for one in found), reverse=True
    )
    more = more_devices(found)
    assert bool(more) == bool(found)
    if more:
        (missing,) = more.values()
        larger = [nodes(*kind), nodes(kind[0], kind[1], -(-missing // kind[1]))]
        met = plan_placement(Estimator(demands, roofline), larger)
        assert met.answered == pytest.approx(sum(one.rate for one in demands), rel=0.01)
