"""The device's page map is the host's, for every page of the plan that is about to run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.model import DevicePageMap
from kvloom.exec.cuda.staging import SentInputs, Staging
from kvloom.kv.pool import Pool
from kvloom.types.geometry import AnyArray, Geometry
from kvloom.types.job import ForwardPlan

GEOMETRY = Geometry(2, 2, 16, 4, 2048)  # 16 tokens a page of 4 blocks
DEVICE = host_device(4)
LANES = DEVICE.partitions.lanes


class _Counted:
    """Sends as jobs do, and counts rows."""

    def __init__(self) -> None:
        self.staging = Staging(DEVICE)
        self.rows = 0

    def __call__(self, arrays: Mapping[str, AnyArray]) -> SentInputs:
        self.rows += len(arrays["map_pages"])
        return self.staging.send(arrays)


def pool() -> Pool:
    return Pool(48, {"m": GEOMETRY}, max_sequences=8, max_tokens={"m": 256})


def agrees(device_map: DevicePageMap, plan: ForwardPlan) -> None:
    for row, held in enumerate(plan.starts + plan.appends):
        pages = plan.tables[row, : GEOMETRY.pages(int(held))]
        np.testing.assert_array_equal(device_map.blocks[torch.from_numpy(pages).long()], plan.page_map[pages])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=30))
def test_whatever_sequences_do(steps: list[tuple[int, int]]) -> None:
    """Step (s, n): sequence s grows by n tokens; by 0 it goes, and one that forks from another comes."""
    used, send = pool(), _Counted()
    cache, device_map = used.caches["m"], DevicePageMap(GEOMETRY, 12, DEVICE.torch)
    for i, (sequence, count) in enumerate(steps):
        if sequence not in cache.sequences:
            others = [one for one in cache.sequences if one != sequence]
            if others and count % 2:
                cache.fork_sequence(others[0], sequence)
            else:
                cache.add_sequence(sequence)
        if not count or cache.blocks_for(sequence, count) > used.available:
            cache.remove_sequence(sequence)
            continue
        plan = cache.begin_forward([sequence], [count])
        device_map.refresh(plan, LANES[i % len(LANES)], send)
        agrees(device_map, plan)
        for copy in plan.copies:
            np.testing.assert_array_equal(device_map.blocks[copy.source], plan.page_map[copy.source])
        cache.end_forward(plan)


def test_a_row_travels_once() -> None:
    cache, send = pool().caches["m"], _Counted()
    device_map = DevicePageMap(GEOMETRY, 12, DEVICE.torch)
    cache.add_sequence(0)
    for count in (20, 5, 7, 1):  # the second page is full with 32, the third begins
        plan = cache.begin_forward([0], [count])
        device_map.refresh(plan, LANES[0], send)
        cache.end_forward(plan)
    assert send.rows == 3


def test_rows_whose_sending_failed_travel_again() -> None:
    cache, send = pool().caches["m"], _Counted()
    device_map = DevicePageMap(GEOMETRY, 12, DEVICE.torch)
    cache.add_sequence(0)
    plan = cache.begin_forward([0], [20])

    def short(arrays: Mapping[str, AnyArray]) -> SentInputs:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        device_map.refresh(plan, LANES[0], short)
    device_map.refresh(plan, LANES[0], send)
    agrees(device_map, plan)


def test_another_pool_counts_anew() -> None:
    """As many changes of a row, and another row."""
    device_map, send = DevicePageMap(GEOMETRY, 12, DEVICE.torch), _Counted()
    for first in (0, 1):
        cache = pool().caches["m"]
        cache.add_sequence(0)
        plan = cache.begin_forward([0], [20])
        plan.page_map[:] = plan.page_map[:, ::-1] if first else plan.page_map
        device_map.refresh(plan, LANES[0], send)
        agrees(device_map, plan)
