"""The time that weights that sleep take to wake: their bytes over the rate of the way on which they come."""

from __future__ import annotations

from typing import Final

from kvloom.plan.cost.devices import DeviceSpec

PINNED: Final = 22 / 32
"""The part of its PCIe link's sheet that a GPU reads pinned memory of its host with: Llumnix (OSDI 2024) saw
22 of 32 GB/s."""
MAPPED: Final = 16e9
"""Bytes a second at which a core maps weights that the system's page cache has: 512 MiB took 17 to 33 ms on a
core of a Xeon."""


def load_bandwidth(device: DeviceSpec | None, gpus: int = 1) -> float:
    """Returns the bytes a second at which weights come into a unit's memory. `device` is None for cores,
    whose weights come from the page cache. Each of the `gpus` has a link, and a part of the weights."""
    return MAPPED if device is None else PINNED * device.host * gpus


def wake_seconds(weights: int, bandwidth: float) -> float:
    """Returns the seconds until weights of so many bytes are awake, if nothing else is on their way."""
    return weights / bandwidth
