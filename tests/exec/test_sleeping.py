"""Weights of real models that sleep: in files, and in an engine whose memory holds one of three."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from kvloom.exec.cpu.executor import TorchExecutor, load_executor
from kvloom.exec.cpu.weights import SleepingModel, put_to_sleep
from kvloom.types.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, running, spec_of

PAGE = 4096


class Holder(nn.Module):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.tensors = list(tensors)


def resident(tensor: Tensor) -> int:
    """The bytes of memory that the mapping has in which the tensor's middle lies."""
    middle, found = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(one, 16) for one in first.split("-"))
            found = low <= middle < high
        elif found and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("it is nowhere")


def test_what_sleeps_takes_no_memory_and_comes_back_the_same(tmp_path: Path) -> None:
    tensors = [torch.randn(300, 1000), torch.randn(64, 64, 70)[:, 1:], torch.arange(10)]
    before = [tensor.clone() for tensor in tensors]
    model = SleepingModel([Holder(*tensors)], tmp_path)
    whole = tensors[0].nbytes + tensors[1].untyped_storage().nbytes()
    assert whole - 5 * PAGE <= model.bytes <= whole, "the whole pages of both large ones"
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    model.let_go()
    assert resident(tensors[0]) == 0
    assert model.read_part()
    assert resident(tensors[0]) >= 1_200_000 - 2 * PAGE
    model.let_go()
    for tensor, kept in zip(tensors, before, strict=True):
        assert tensor.equal(kept), "it comes from the file by itself if it is read too early"


def test_parts_come_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.cpu.weights._PART", 1 << 20)
    first, last = torch.zeros(1 << 20), torch.zeros(1 << 20)
    model = SleepingModel([Holder(first, last)], tmp_path)
    model.let_go()
    assert not model.read_part()
    assert resident(first) > 0
    assert resident(last) == 0
    assert model.read_part()
    assert resident(last) > 0


def test_a_kernel_that_populates_no_pages_touches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.exec.cpu.weights.POPULATE_READ", 12345)
    tensor = torch.zeros(1 << 20)
    model = SleepingModel([Holder(tensor)], tmp_path)
    model.let_go()
    assert model.read_part()
    assert resident(tensor) >= tensor.nbytes - 2 * PAGE


def test_a_folder_without_room(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sleep_dir: .*none cannot hold the weights of m while they sleep"):
        put_to_sleep("m", [Holder(torch.zeros(1 << 16))], tmp_path / "none")


def test_same_tokens_in_the_memory_of_one_model(tmp_path: Path) -> None:
    """The checkpoints are gone by the time that the models are woken."""
    kinds = {"a": "llama", "b": "qwen3", "c": "qwen2"}
    paths = {
        name: make_checkpoint(tmp_path / name, kind, hidden_size=256, intermediate_size=512)
        for name, kind in kinds.items()
    }
    asked = [body(name, [1, 2, 3, 4 + i] * 10, max_tokens=24) for name in paths for i in range(3)]
    spec = replace(spec_of(paths), kv_bytes=10 << 20)

    async def play(folder: str) -> tuple[list[dict[int, list[int]]], int]:
        async with running(replace(spec, sleep_dir=folder)) as engine:
            if folder:
                shutil.rmtree(tmp_path / "a")
            answers = await asyncio.gather(*(ask(engine, one) for one in asked))
            weights = [model.weights for model in (await engine.load()).models.values()]
            return [answer.tokens for answer in answers], sum(one.wakes_total for one in weights if one)

    told, never = asyncio.run(play(""))
    found, wakes = asyncio.run(play(str(tmp_path)))
    assert found == told
    assert never == 0
    assert wakes >= len(paths)


def test_a_budget_that_does_not_hold_the_largest_model(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", hidden_size=256, intermediate_size=512)
    spec = replace(spec_of({"m": path}), kv_bytes=1 << 20, sleep_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"memory: 1,048,576 bytes .* m, .* at least [\d,]+ are needed"):
        load_executor(spec)


def test_a_budget_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path / "small", "llama")
    large = make_checkpoint(tmp_path / "large", "llama", hidden_size=256, intermediate_size=512)
    spec = replace(spec_of({"small": small, "large": large}), kv_bytes=1 << 20, sleep_dir=str(tmp_path))
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"memory: 1,048,576 bytes do not hold large, whose weights"):
        TorchExecutor.within_budget(spec, told.append)
    assert told == []
