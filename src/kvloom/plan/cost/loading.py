"""The time that a new process takes to load its weights, and that weights that sleep take to wake."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvloom.plan.cost.devices import DeviceSpec
from kvloom.plan.cost.shapes import ModelShape

STARTING: Final = 4.0
"""The seconds that a process without weights takes to start: the demo fleet's, by benchmarks.memory_start."""
LOADING: Final = 1.1e9
"""Bytes of weights a second: the 16 GB of Llama-3-8B from a cloud's disk (AWS gp3) to an A10G took 14.3 s at
best (NVIDIA, Run:ai Model Streamer, 2024)."""
PINNED: Final = 22 / 32
"""The part of its PCIe link's sheet that a GPU reads pinned memory of its host with: Llumnix (OSDI 2024) saw
22 of 32 GB/s."""
MAPPED: Final = 16e9
"""Bytes a second at which a core maps weights that the system's page cache has: 512 MiB took 17 to 33 ms on a
core of a Xeon."""


def start_seconds(shapes: Iterable[ModelShape]) -> float:
    """Returns the seconds until a new process that serves these models can answer."""
    return STARTING + sum(shape.weight_bytes for shape in shapes) / LOADING


def load_bandwidth(device: DeviceSpec | None, gpus: int = 1) -> float:
    """Returns the bytes a second at which weights come into a unit's memory. `device` is None for cores,
    whose weights come from the page cache. Each of the `gpus` has a link, and a part of the weights."""
    return MAPPED if device is None else PINNED * device.host * gpus


def wake_seconds(weights: int, bandwidth: float) -> float:
    """Returns the seconds until weights of so many bytes are awake, if nothing else is on their way."""
    return weights / bandwidth
