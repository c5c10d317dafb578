"""What the fork server imports, and what it must not do by that."""

from __future__ import annotations

import os
import subprocess
import sys

from kvloom.config.config import DEMO
from kvloom.serve.forkserver import SINGLE_THREADED

PROGRAM = f"""
import os, sys
from kvloom.serve.engine_process import preload
steps = preload()
hidden = {{"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton"}}
assert not hidden & set(sys.modules), hidden & set(sys.modules)
for step in steps:
    step()
import torch
assert not torch.cuda.is_initialized()
assert len(os.listdir("/proc/self/task")) == 1
from kvloom.types.spec import ModelSpec
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
before = set(sys.modules)
load_model(ModelSpec(name="sums", path="{DEMO}/sums"), 4096, CPU)
late = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not late & {{"sympy", "numba", "safetensors", "tokenizers", "huggingface_hub"}}, late
assert not hidden & set(sys.modules), hidden & set(sys.modules)
import torch._dynamo
assert torch._dynamo.disable(len) is not len and torch.distributed.is_available()
"""


def test_engines_find_all_that_they_need_and_no_compiler() -> None:
    """One thread is left, so that it can fork; whoever wants torch's compiler later gets the true one."""
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | SINGLE_THREADED, check=True, timeout=120)
