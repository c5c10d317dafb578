"""Law 2 and half precision on a GPU, in contexts of up to 32k tokens, short and long ones in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvloom.exec.cuda.device import uncut
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.loader import load_executor, open_gpu
from kvloom.types.spec import Dtype, EngineSpec
from tests.checkpoints import make_checkpoint
from tests.gpu.exactness import Asked, Stock, check_logprobs, check_tokens, serve, spec

LONGEST = 32768
LENGTHS = (3, 130, 1025, 5000, 32000)
COUNT = 16
HERE = torch.device("cuda", 0)
GIVEN: dict[str, Any] = {"max_position_embeddings": LONGEST, "hidden_size": 256, "initializer_range": 0.1}
# bounds of scores and windows, head sizes from 64 to 256
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, heads of 64": ("llama", {"head_dim": 64}),
    "qwen3, heads of 128": ("qwen3", {"head_dim": 128}),
    "mistral, heads of 80, a window": ("mistral", {"head_dim": 80, "sliding_window": 4096}),
    "gemma2, heads of 256, windows, soft caps": ("gemma2", {"head_dim": 256, "sliding_window": 1000}),
}
SIZES = {"max_running": 8, "kv_bytes": 1 << 30, "block_bytes": 16384, "chunk_tokens": 2048}


def checkpoint(folder: Path, form: str) -> Path:
    architecture, special = FORMS[form]
    return make_checkpoint(folder, architecture, **(GIVEN | special))


def load(wanted: EngineSpec) -> GpuExecutor:
    """Without partitions: in each of them kernels would be compiled for other splits of so long a context."""
    return load_executor(wanted, *open_gpu(wanted.device, uncut))


@pytest.mark.parametrize("form", [*FORMS])
def test_tokens_are_transformers_own_in_float32(form: str, tmp_path: Path) -> None:
    path, asked = checkpoint(tmp_path, form), Asked.of(LENGTHS, COUNT)
    wanted = replace(spec(path, "float32", SIZES), device="cuda:0")
    answers = serve(wanted, load(wanted), asked)
    check_tokens(Stock(path, HERE, torch.float32), asked, answers)


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, "bfloat16") for form in FORMS), ("qwen3, heads of 128", "float16")]
)
def test_logits_are_within_half_precisions_own_error(form: str, dtype: Dtype, tmp_path: Path) -> None:
    path, asked = checkpoint(tmp_path, form), Asked.of(LENGTHS, COUNT)
    wanted = replace(spec(path, dtype, SIZES), device="cuda:0")
    answers = serve(wanted, load(wanted), asked, logprobs=0)
    kind = getattr(torch, dtype)
    check_logprobs(Stock(path, HERE, torch.float32, kind), Stock(path, HERE, kind), asked, answers)
