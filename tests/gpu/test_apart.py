"""Law 2 where K and V go from one pool on the GPU to another over NIXL.

Both are in one process, where UCX does not take CUDA IPC; `tools/gpu_checks/memory.py` has two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvloom.exec.cuda.loader import load_gpu_executor
from kvloom.transfer.nixl_agent import GpuPlace
from tests.checkpoints import make_checkpoint
from tests.exec.cuda.apart import check_prefilled_apart
from tests.gpu.test_served import spec
from tests.transfer.kinds import NIXL


@pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
def test_prefilled_apart_the_tokens_are_transformers_own(tmp_path: Path) -> None:
    path, device = make_checkpoint(tmp_path, "gemma2"), torch.device("cuda", 0)
    check_prefilled_apart(path, spec({"m": path}), load_gpu_executor, lambda: GpuPlace(device))
