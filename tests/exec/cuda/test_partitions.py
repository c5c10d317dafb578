"""Which lane a job takes: the nearest side, of one pair at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.exec.cuda.device import HostStream, PartitionLane, Partitions

COMPUTE = 132
SMALLER = (16, 32, 48, 64)


def partitions() -> Partitions:
    pairs = [
        (PartitionLane(size, HostStream()), PartitionLane(COMPUTE - size, HostStream())) for size in SMALLER
    ]
    return Partitions(PartitionLane(COMPUTE, HostStream()), pairs)


def test_a_job_takes_the_nearest_side_and_the_next_what_is_left() -> None:
    cut = partitions()
    assert cut.take(COMPUTE) is cut.whole  # a job with everything is bound to no partition
    halves = cut.take(66), cut.take(66)
    assert set(halves) == set(cut.pairs[3])
    cut = partitions()
    assert cut.take(100).compute == 100
    assert cut.take(20).compute == 32


@given(st.lists(st.tuples(st.integers(1, COMPUTE), st.booleans()), max_size=40))
def test_jobs_at_once_are_on_sides_of_one_pair(steps: list[tuple[int, bool]]) -> None:
    """And spread over them; whatever was given back is free again."""
    cut, running = partitions(), list[PartitionLane]()
    for share, ends in steps:
        if ends and running:
            cut.give_back(running.pop(share % len(running)))
            continue
        running.append(cut.take(share))
        parts = {lane for lane in running if lane is not cut.whole}
        assert any(parts <= set(pair) for pair in cut.pairs)
    for lane in cut.lanes:
        assert lane.jobs == running.count(lane)


def test_what_runs_at_once_is_a_pair_and_what_was_given_everything() -> None:
    cut = partitions()
    each = dict.fromkeys(cut.lanes, 1)
    each[cut.whole] = 100
    each[cut.pairs[0][0]], each[cut.pairs[2][0]], each[cut.pairs[2][1]] = 9, 5, 6
    assert cut.at_once(each) == 100 + 5 + 6
    assert Partitions(cut.whole, []).at_once({cut.whole: 7}) == 7
