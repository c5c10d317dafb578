"""LoRA adapters as PEFT saves them, and checkpoints with their weights merged in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def place_of(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'mlp' if name in _MLP else 'self_attn'}.{name}"


def make_adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.1,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint `base` whose A and B are random."""
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for key, weight in weights.items():
        place = key.removesuffix(".weight")
        if key.endswith(".weight") and place.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                made = spread * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{place}.lora_{side}.weight"] = made.to(dtype)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(said | config))
    return path


def scale_of(adapter: Path) -> float:
    said = json.loads((adapter / "adapter_config.json").read_text())
    return float(said["lora_alpha"] / (said["r"] ** 0.5 if said.get("use_rslora") else said["r"]))


def merge(path: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint `base` with the adapter merged into its weights, in float32."""
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if ".lora_A." in key:
            place = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            weights[place] = weights[place].float() + scale_of(adapter) * b.float() @ a.float()
    path.mkdir(parents=True)
    for file in base.iterdir():
        if file.name != "model.safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
