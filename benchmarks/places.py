"""Where the benchmarks keep what they make: all under build/, which git ignores."""

from __future__ import annotations

from pathlib import Path

from tools.make_checkpoint import make_shape

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
BENCH = BUILD / "bench"
LOGS = BENCH / "logs"
VLLM_VENV = BUILD / "vllm-venv"
LLAMA_VENV = BUILD / "llama-venv"


def checkpoint(shape: str, dtype: str = "float32") -> Path:
    """The checkpoint of a shape, made on first use."""
    path = BENCH / "checkpoints" / (shape if dtype == "float32" else f"{shape}-{dtype}")
    if not (path / "model.safetensors").exists():
        make_shape(path, shape, dtype=dtype)
    return path
