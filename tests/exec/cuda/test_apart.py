"""Law 2 where a GPU's K and V go over NIXL layer by layer, which in CI moves the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of
from tests.exec.cuda.apart import check_prefilled_apart
from tests.exec.cuda.devices import COMPUTE
from tests.transfer.device_memory import LikeAGpu
from tests.transfer.kinds import NIXL


@pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
def test_prefilled_apart_the_tokens_are_transformers_own(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma2")
    spec = spec_of({"m": path}, max_running=8)
    check_prefilled_apart(
        path, spec, lambda one: load_executor(one, host_device(COMPUTE), plain_operations()), LikeAGpu
    )
