"""What the device allows: bytes a second from and to its memory, and bfloat16 products a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from tools.gpu_checks.report import Figure

_BYTES = 2 << 30
_SIZE = 8192


def timed(work: Callable[[], object], times: int = 10) -> float:
    """Seconds on the device, the median of several."""
    work()
    found: list[float] = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found)


def bandwidth() -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _BYTES / timed(lambda: target.copy_(source))


def products() -> float:
    """Floating point operations a second of a large product in bfloat16."""
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * _SIZE**3 / timed(lambda: a @ b)


def ceilings() -> list[Figure]:
    return [
        Figure(name="copy of 2 GiB, reads and writes", value=bandwidth() / 1e9, unit="GB/s"),
        Figure(name=f"bfloat16 product of {_SIZE}³", value=products() / 1e12, unit="TFLOP/s"),
    ]
