"""Tests of kernels that want FP8."""

from __future__ import annotations

import pytest
import torch

NEEDS_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="GPUs have FP8 from compute capability 8.9 on",
)
