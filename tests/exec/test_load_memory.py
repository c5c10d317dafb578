"""The memory that a load takes on the way is little more than what stays, and what stays is told apart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.memory_load import MOST, measured
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from torch import nn

from kvloom.exec.huggingface import children
from kvloom.exec.mapped import MappedFiles
from kvloom.types.spec import Dtype
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load
from tests.ggufs import make_gguf

SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}
SLACK_MIB = 64.0  # of products' scratch, and what the C library keeps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("large"), "qwen2", dtype=torch.bfloat16, **SHAPE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_holds_little_more_than_what_stays(checkpoint: Path, dtype: Dtype) -> None:
    size = (checkpoint / "model.safetensors").stat().st_size / (1 << 20)
    stays = size * (2 if dtype == "float32" else 1)
    found = asyncio.run(measured(checkpoint, dtype))
    assert 0.9 * stays < found.private < stays + SLACK_MIB
    assert found.peak < MOST * stays + SLACK_MIB


def test_experts_of_few_bits_are_never_whole(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_local_experts": 16,
    }
    file, source = make_gguf(tmp_path, "mixtral", Type.Q4_0, initializer_range=0.05, **sizes)
    whole = (source / "model.safetensors").stat().st_size / (1 << 20)
    found = asyncio.run(measured(file, "float32"))
    assert whole / 8 < found.private
    assert found.peak < MOST * whole / 6 + SLACK_MIB < whole


def test_a_large_weight_that_is_not_packed_stays_in_its_file(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", vocab_size=8192)
    module = load(path).module
    embedding = module.get_submodule("model.embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    assert in_file(embedding.weight, path)
    assert not in_file(module.get_submodule("model.norm").get_parameter("weight"), path)


def in_file(weight: torch.Tensor, path: Path) -> bool:
    """Whether the kernel says that the weight lies in the checkpoint's file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(one, 16) for one in line.split()[0].split("-"))
        if low <= weight.data_ptr() < high:
            return line.endswith(str(path / "model.safetensors"))
    return False


def test_pages_that_were_given_back_are_read_again(tmp_path: Path) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.float32)
    save_file({"one": numbers, "two": numbers + 1}, tmp_path / "some.safetensors")
    files = MappedFiles([tmp_path / "some.safetensors"])
    read = {one.name: one[...] for one in files.tensors()}
    kept = read["one"].view(1 << 8, 1 << 8)
    assert all(files.holds(one) for one in read.values())
    assert not files.holds(numbers)
    read.clear()  # the pages of both go
    assert kept.flatten().equal(numbers)
    files.release()
    assert kept.flatten().equal(numbers)
    del files
    assert kept.flatten().equal(numbers)


def test_replaced_modules_are_let_go_one_by_one() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(3)))
    seen = []
    for parent, name, child in children(model):
        seen.append(type(child))
        if isinstance(child, nn.Sequential):
            setattr(parent, name, nn.Identity())
    assert seen == [nn.Sequential] * 3  # and not what was in them
