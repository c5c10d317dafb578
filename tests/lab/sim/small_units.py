"""Units of one little model `m`, for runs whose every step is laid down."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.lab.faults.faults import VOCAB
from kvloom.lab.sim.executor import Evenly
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.spec import EngineSpec, ModelSpec


def small_units(
    blocks: Sequence[int], step: float, *, layers: int, context: int, lease: float, bandwidth: float
) -> tuple[SimulatedUnit, ...]:
    """One of so many blocks each. step: seconds of a job, and of a token. lease: seconds. bandwidth: bytes/s
    between them."""
    shape = ModelShape(layers=layers, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=VOCAB)
    return tuple(
        SimulatedUnit(
            EngineSpec(
                models=(ModelSpec(name="m", path="", max_context=context),),
                kv_bytes=count * 128,
                block_bytes=128,
                policy="fcfs",
                max_running=4,
                max_waiting=8,
                chunk_tokens=64,
                threads=1,
                unit=f"unit-{i}",
                lease=lease,
            ),
            {"m": shape},
            1,
            Evenly(step),
            bandwidth=bandwidth,
            stride=1,
        )
        for i, count in enumerate(blocks)
    )
