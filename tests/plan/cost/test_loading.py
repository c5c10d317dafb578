"""How long weights take to wake."""

from __future__ import annotations

import pytest

from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.loading import load_bandwidth, wake_seconds
from kvloom.plan.cost.shapes import find_shape


def test_weights_come_over_the_link_of_their_device() -> None:
    """16 GB of Llama-3-8B: over PCIe 4 at the 22 GB/s that Llumnix saw, twice as fast over PCIe 5, and over
    two links in half the time."""
    weights = find_shape("llama3-8b").weight_bytes
    slow = wake_seconds(weights, load_bandwidth(find_device("A100-80")))
    assert slow == pytest.approx(weights / 22e9)
    assert wake_seconds(weights, load_bandwidth(find_device("H100"))) == pytest.approx(slow / 2)
    assert wake_seconds(weights, load_bandwidth(find_device("A100-80"), 2)) == pytest.approx(slow / 2)


def test_cores_map_what_the_page_cache_has() -> None:
    assert wake_seconds(1 << 29, load_bandwidth(None)) == pytest.approx(0.0336, abs=1e-3)
