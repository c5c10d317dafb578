"""On which multiprocessors a stream's work runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from tools.gpu_checks.report import Figure
from tools.gpu_checks.systems import split

from kvloom.exec.cuda.device import GpuDevice, PartitionLane

_PROGRAMS = 4096
_ROUNDS = 4000


@triton.jit
def _where(out, rounds):  # type: ignore[no-untyped-def]
    """A program writes its multiprocessor's number, after work that keeps it busy for a while."""
    value = tl.program_id(0).to(tl.float32)
    for _ in range(rounds):
        value = value * 1.0001 + 0.5
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0), tl.where(value == -1.0, -1, number))


def multiprocessors(lane: PartitionLane) -> set[int]:
    """That work of this lane reaches."""
    with torch.inference_mode(), lane.entered():
        out = torch.full((_PROGRAMS,), -1, dtype=torch.int32, device="cuda")
        _where[(_PROGRAMS,)](out, _ROUNDS)
    lane.mark().wait()
    return set(out.tolist())


def recorded(lane: PartitionLane) -> set[int]:
    """That the replay of a recording of this lane reaches."""
    with torch.inference_mode(), lane.entered():
        out = torch.full((_PROGRAMS,), -1, dtype=torch.int32, device="cuda")
        _where[(_PROGRAMS,)](out, _ROUNDS)
        recording = lane.record(lambda: _where[(_PROGRAMS,)](out, _ROUNDS))
        out.fill_(-1)
        recording.replay()
    lane.mark().wait()
    return set(out.tolist())


def disjoint(device: GpuDevice) -> list[Figure]:
    """Raises AssertionError where the sides of a pair share a multiprocessor, live or in a recording."""
    figures = []
    for first, second in device.partitions.pairs:
        for look in (multiprocessors, recorded):
            sides = look(first), look(second)
            common = sides[0] & sides[1]
            assert not common, f"{look.__name__}: both sides run on {sorted(common)}"
            assert len(sides[0]) <= first.compute, (len(sides[0]), first.compute)
            assert len(sides[1]) <= second.compute, (len(sides[1]), second.compute)
        figures.append(
            Figure(
                name=f"partition {first.compute} + {second.compute}",
                value=len(sides[0]),
                unit="of SMs",
                bound=first.compute,
                note=f"and {len(sides[1])}; none in common, live and recorded",
            )
        )
    return figures


def disjoint_split(device: GpuDevice) -> list[Figure]:
    """Of a static split, as several models have it. Raises AssertionError where it is none."""
    found = split(device, (13, 1, 1, 1))
    assert not found.why, found.why
    parts = [multiprocessors(one.partitions.whole) for one in found.devices]
    reached = set().union(*parts)
    assert sum(map(len, parts)) == len(reached), f"parts have multiprocessors in common: {parts}"
    name = f"static split {' + '.join(str(one.compute) for one in found.devices)}"
    return [Figure(name=name, value=len(reached), unit="of SMs", bound=device.compute)]
