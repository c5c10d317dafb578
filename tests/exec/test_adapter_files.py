"""What is refused of an adapter's files: one line each, which says what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvloom.exec.adapters import read_adapter
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.types.errors import ConfigError
from kvloom.types.spec import AdapterSpec, ModelSpec
from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint

WEIGHTS = "adapter_model.safetensors"
SHAPES = {
    (layer, name): shape
    for layer in range(3)
    for name, shape in {
        "q_proj": (64, 64),
        "k_proj": (32, 64),
        "v_proj": (32, 64),
        "o_proj": (64, 64),
        "gate_proj": (96, 64),
        "up_proj": (96, 64),
        "down_proj": (64, 96),
    }.items()
}
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = make_checkpoint(tmp_path / "base", "qwen2")
    return make_adapter(tmp_path / "adapter", base)


def refusal(adapter: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_adapter(str(adapter), SHAPES)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value.message


def change(adapter: Path, tensors: dict[str, Tensor | None]) -> None:
    kept = load_file(adapter / WEIGHTS)
    changed = {**kept, **tensors}
    save_file({key: one for key, one in changed.items() if one is not None}, adapter / WEIGHTS)


def test_a_good_one_is_read(adapter: Path) -> None:
    found = read_adapter(str(adapter), SHAPES)
    assert (found.rank, found.scale) == (4, 2.0)
    assert set(found.weights) == set(SHAPES)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3'; LORA is right"),
        ({"use_dora": True}, "use_dora: it has weights of DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: it has whole modules"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: it has ranks of their own"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: it has scales of their own"),
        ({"bias": "all"}, "bias: 'all'; none is right"),
        ({"r": 2}, "r: 2; a rank from 4 to 256 is right"),
        ({"r": 512}, "r: 512; a rank from 4 to 256 is right"),
        ({"r": True}, "r: True; a rank"),
        ({"r": 8}, "has the rank 4, and adapter_config.json says 8"),
        ({"lora_alpha": float("nan")}, "lora_alpha: nan; a number"),
        ({"lora_alpha": "16"}, "lora_alpha: '16'; a number"),
    ],
)
def test_settings_that_are_not_served(adapter: Path, config: dict[str, Any], said: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert said in refusal(adapter)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({FIRST: torch.full((4, 64), torch.nan)}, "NaN or infinite"),
        ({FIRST: torch.full((4, 64), torch.inf)}, "NaN or infinite"),
        ({FIRST: torch.ones(4, 128)}, "has the shape [4, 128]; [4, 64] is right for this base"),
        ({FIRST: torch.ones(9, 64)}, "has the rank 9"),
        ({FIRST: torch.ones(4, 64, dtype=torch.int8)}, "is of torch.int8; float32, bfloat16 or float16"),
        ({FIRST: None}, "has one of lora_A and lora_B of q_proj in layer 0"),
        ({FIRST.replace("layers.0", "layers.3"): torch.ones(4, 64)}, "the base has 3 layers"),
        ({FIRST.replace("q_proj", "qkv_proj"): torch.ones(4, 64)}, "the base has no such layer that adapts"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "the base has no such layer"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)},
            "no weight of plain LoRA",
        ),
        ({FIRST.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(4)}, "no weight of plain LoRA"),
    ],
)
def test_weights_that_do_not_fit(adapter: Path, tensors: dict[str, Tensor | None], said: str) -> None:
    change(adapter, tensors)
    assert said in refusal(adapter)


def test_files_that_are_not_read(adapter: Path, tmp_path: Path) -> None:
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-8])
    assert WEIGHTS in refusal(adapter)
    (adapter / WEIGHTS).write_bytes(data[:4])
    assert "cut short" in refusal(adapter)
    (adapter / WEIGHTS).unlink()
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    assert "adapter_model.bin is a pickle, which is not read" in refusal(adapter)
    (tmp_path / "elsewhere").write_bytes(data)
    (adapter / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    assert "leaves its folder" in refusal(adapter)
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    (adapter / WEIGHTS).unlink()
    assert "cannot be read" in refusal(adapter)
    assert "has no adapter_config.json" in refusal(tmp_path / "base")


def test_a_base_that_is_not_fused_has_no_adapters(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "gemma2")
    spec = ModelSpec(name="m", path=str(base), adapters=(AdapterSpec("a", str(tmp_path / "a")),))
    with pytest.raises(ConfigError, match=r"models\.a: its base m is no decoder"):
        TorchExecutor.load([spec], kv_bytes=1 << 20, block_bytes=2048, threads=1)
