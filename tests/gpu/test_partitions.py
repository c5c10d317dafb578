"""The sides of a pair share no multiprocessor, live or in a recording."""

from __future__ import annotations

from kvloom.exec.cuda.device import cuda_device, cut_green
from kvloom.exec.cuda.operations import triton_operations


def test_partitions_are_disjoint() -> None:
    from tools.gpu_checks.partitions import disjoint  # noqa: PLC0415 -- it compiles for a GPU

    device = cuda_device(0, cut_green, triton_operations())
    assert 4 <= len(device.partitions.pairs) <= 8
    for first, second in device.partitions.pairs:
        assert first.compute + second.compute == device.compute
    disjoint(device)
