"""Three small models of unlike shapes for one pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvloom.types.spec import EngineSpec, Policy
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of
from tests.oracle import Oracle

BLOCK = 2048
HALF = "small"  # the model served in bfloat16
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 42}


@dataclass(frozen=True)
class Fleet:
    paths: dict[str, Path]
    oracles: dict[str, Oracle]


def make_fleet(root: Path) -> Fleet:
    """Heads of 16, 24 and 32; 3, 4 and 2 layers; 2, 1 and 2 KV heads."""
    paths = {
        "wide": make_checkpoint(root / "wide", "qwen2"),
        "tall": make_checkpoint(root / "tall", "qwen3", num_hidden_layers=4),
        "small": make_checkpoint(root / "small", "mistral", num_hidden_layers=2),
    }
    return Fleet(paths, {name: Oracle(path) for name, path in paths.items() if name != HALF})


def spec(fleet: Fleet, *, policy: Policy = "adbs", blocks: int = 2000, **changes: int) -> EngineSpec:
    plain = spec_of(fleet.paths, policy=policy, kv_bytes=blocks * BLOCK, block_bytes=BLOCK, **changes)
    models = tuple(replace(m, dtype="bfloat16") if m.name == HALF else m for m in plain.models)
    return replace(plain, models=models)
