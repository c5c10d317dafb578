"""Tells as JSON what torch and numba find on this machine: `python -m kvloom.kernels.processor`.

A process of its own asks, so that whoever wants to know needs no torch, and outlives one that cannot be
imported."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from kvloom.kernels.cpu.lanes.floats import has

FEATURES: Final = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512vnni",
    "BF16": "avx512bf16",
    "AMX": "amx-bf16",
}
"""The instructions that matter to kernels and to oneDNN, and LLVM's names of them."""


def look() -> dict[str, Any]:
    """Returns the build of torch, the instructions that kernels may use, and the GPUs that torch can use."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "features": [name for name, feature in FEATURES.items() if has(feature)],
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
    }


if __name__ == "__main__":
    print(json.dumps(look()))
