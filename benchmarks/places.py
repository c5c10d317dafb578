"""Where the benchmarks keep what they make: all under build/, which git ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tools.make_checkpoint import make_shape

from kvloom.exec.quantize import quantize_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
BENCH = BUILD / "bench"
LOGS = BENCH / "logs"
VLLM_VENV = BUILD / "vllm-venv"
LLAMA_VENV = BUILD / "llama-venv"


def checkpoint(shape: str, dtype: str = "float32") -> Path:
    """Returns the checkpoint of a shape, which is made on first use."""
    path = BENCH / "checkpoints" / (shape if dtype == "float32" else f"{shape}-{dtype}")
    if not (path / "model.safetensors").exists():
        make_shape(path, shape, dtype=dtype)
    return path


def quantized(shape: str, bits: Literal[4, 8]) -> Path:
    """Returns the shape in bfloat16 as `kvloom quantize` makes it, on first use."""
    source = checkpoint(shape, "bfloat16")
    if not (out := source.with_name(f"{source.name}-int{bits}")).exists():
        quantize_checkpoint(str(source), None, out, bits, lambda _: None)
    return out
