"""The transports there are."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

NIXL = find_spec("nixl_cu13") is not None
CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
)
_NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
)
DEVICE = "device"  # the plane between GPUs' arenas, with the host's memory as the device's
_GPUS = pytest.param("nixl-device", marks=_NIXL.marks)  # NIXL as between GPUs' arenas, likewise
NIXL_CUDA = pytest.param("nixl-cuda", marks=[*CUDA.marks, *_NIXL.marks])
MORTAL = ["shm", "tcp", CUDA, _NIXL, NIXL_CUDA]
_STAGED = pytest.param("nixl-staged", marks=_NIXL.marks)  # whatever is sent goes through staging buffers
KINDS = [*MORTAL, DEVICE, _GPUS, _STAGED, "paths", "far-paths"]
