"""A model cut down to two ranks' slices is the same model, whatever its plan; what cannot be is refused."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom.exec.attention import NAME, Scoring
from kvloom.exec.cpu.decoder import fuse_decoder
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.cpu.fuse import fuse_on_cpu
from kvloom.exec.loader import load_model
from kvloom.exec.parallel.group import RankGroup
from kvloom.exec.parallel.slicing import slice_model
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.geometry import Geometry
from kvloom.types.spec import ModelSpec
from tests.checkpoints import ARCHITECTURES, VOCAB, config_of, make_checkpoint
from tests.exec.loading import BLOCK
from tests.exec.ranks import Alone, both

_NONE = "transformers has no tensor-parallel plan for it"
UNPLANNED = {
    **dict.fromkeys(("gpt2", "bloom", "falcon", "falcon_groups", "mpt", "stablelm"), _NONE),
    **dict.fromkeys(("gpt_oss", "deepseek_v3"), "leaves model.layers.0.self_attn whole"),
    "deepseek_v2": "has mla_kv_a_proj for model.layers.0.self_attn.kv_a_proj_with_mqa",
    "llama4": "has packed_rowwise for model.layers.1.feed_forward.experts.gate_up_proj",
}
"""Architectures that ranks cannot share, and why."""
# A part of Gemma 3n's sparse MLPs sees other means than the whole: the proof at load refuses such slices.
PLANNED = sorted(ARCHITECTURES.keys() - UNPLANNED.keys() - {"gemma3n"})


def stock_of(architecture: str, **changes: Any) -> Any:
    """A random model that two ranks can share, ready to be sliced."""
    config = config_of(architecture, **{"num_key_value_heads": 2} | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 1:  # biases, which begin as 0, and norms
            weight.add_(0.2 * torch.randn(weight.shape))
    return model


def numbers(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("architecture", PLANNED)
def test_slices_give_the_logits_of_the_whole(architecture: str, tmp_path: Path) -> None:
    stock = stock_of(architecture)
    copies = [copy.deepcopy(stock) for _ in range(2)]
    ids = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))

    def run(group: RankGroup) -> torch.Tensor:
        with torch.inference_mode():
            slice_model(copies[group.rank], group)
            logits: torch.Tensor = copies[group.rank](input_ids=ids, use_cache=False).logits
        return logits

    with torch.inference_mode():
        expected = stock(input_ids=ids, use_cache=False).logits
    found = both(tmp_path, run)
    assert torch.equal(*found)
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    whole = numbers(stock.get_input_embeddings())
    for one in copies:
        assert (
            numbers(one) - whole < 0.65 * (numbers(stock) - whole) + whole * stock.config.tie_word_embeddings
        )


@pytest.mark.parametrize("architecture", sorted(UNPLANNED))
def test_what_ranks_cannot_share(architecture: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slice_model(stock_of(architecture), RankGroup(0, 2))
    assert UNPLANNED[architecture] in caught.value.message


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_slices_are_fused_like_the_whole(architecture: str, tmp_path: Path) -> None:
    stock = stock_of(architecture)
    config, copies = stock.config, [copy.deepcopy(stock) for _ in range(2)]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scoring = Scoring(size**-0.5, window=getattr(config, "sliding_window", None) or 0)
    geometry = Geometry(config.num_hidden_layers, 1, size, 4, BLOCK)

    def run(group: RankGroup) -> bool:
        model = copies[group.rank]
        with torch.inference_mode():
            slice_model(model, group)
            model.set_attn_implementation(NAME)
            fuse_on_cpu(model)
        return fuse_decoder(model, dict.fromkeys(range(geometry.layers), scoring), geometry) is not None

    assert both(tmp_path, run) == [True, True]


def test_a_vocabulary_that_cannot_be_halved(tmp_path: Path) -> None:
    stock = stock_of("qwen2", vocab_size=VOCAB + 1)
    copies = [copy.deepcopy(stock) for _ in range(2)]
    ids = torch.arange(5)[None]

    def run(group: RankGroup) -> torch.Tensor:
        slice_model(copies[group.rank], group)
        with torch.inference_mode():
            logits: torch.Tensor = copies[group.rank](input_ids=ids, use_cache=False).logits
        return logits

    found = both(tmp_path, run)
    with torch.inference_mode():
        assert torch.allclose(found[1], stock(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def refusal(path: Path, ranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelSpec(name="mine", path=str(path)), BLOCK, CPU, Alone(RankGroup(0, ranks)))
    return caught.value.message


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2")
    assert refusal(path, 3) == (
        "models.mine: 3 ranks cannot share its 2 KV heads evenly; a `tensor_parallel` of 1, 2 is right"
    )
    assert "4 ranks cannot share its 2 KV heads" in refusal(path, 4)


def test_a_width_that_ranks_cannot_share(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", intermediate_size=97)
    assert refusal(path, 2) == (
        "models.mine: model.layers.0.mlp.gate_proj is 97 wide, which 2 ranks cannot share evenly; "
        "another `tensor_parallel` is right"
    )


def test_a_model_without_a_plan(tmp_path: Path) -> None:
    assert refusal(make_checkpoint(tmp_path, "gpt2"), 2) == (
        "models.mine: transformers has no tensor-parallel plan for it; `tensor_parallel: 1` is right"
    )


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"layers.*.mlp": "sequence_parallel"}, "has sequence_parallel for model.layers.0.mlp, a Qwen2MLP,"),
        ({"layers.*.mlp.down_proj": "rowwise"}, "leaves model.layers.0.self_attn whole;"),
        ({"norm.weight": "colwise"}, "has colwise for model.norm.weight, which kvloom cannot slice;"),
    ],
)
def test_a_plan_that_is_not_known(plan: dict[str, str], line: str) -> None:
    stock = stock_of("qwen2")
    plan = {f"model.{name}": style for name, style in plan.items()}
    stock._tp_plan = plan  # its setter would look the styles up
    with pytest.raises(ConfigError) as caught:
        slice_model(stock, RankGroup(0, 2))
    assert line in caught.value.message
    assert caught.value.message.startswith("its tensor-parallel plan ")


def test_jobs_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    """The ranks begin with the slots in opposite order."""

    def run(group: RankGroup) -> list[float]:
        def job(slot: int) -> float:
            group.enter(slot)
            return float(group.sum(torch.tensor(10.0**slot)))

        with ThreadPoolExecutor(2) as jobs:
            order = [0, 1] if group.rank == 0 else [1, 0]
            return sorted(jobs.map(job, order))

    assert both(tmp_path, run, slots=2) == [[2.0, 20.0]] * 2


def lost(group: RankGroup, rows: int = 1) -> str:
    with pytest.raises(Unavailable) as caught:
        group.sum(torch.ones(rows))
    return caught.value.message


@pytest.mark.parametrize("rows", [1, 0])
def test_a_rank_that_is_late(tmp_path: Path, rows: int) -> None:
    """It is waited for also where nothing is summed: its part says that it has written its K and V."""
    given_up = threading.Event()

    def run(group: RankGroup) -> str:
        if group.rank:
            given_up.wait(60)
            return ""
        group._channel.set_timeout(timedelta(seconds=0.1))
        try:
            return lost(group, rows)
        finally:
            given_up.set()

    assert both(tmp_path, run)[0].startswith("the exchange with the other ranks failed: Timed out")


def test_a_rank_that_has_left(tmp_path: Path) -> None:
    met = threading.Event()  # a rank that leaves while the other one still connects is another failure

    def run(group: RankGroup) -> str:
        if group.rank:
            met.wait(60)
            return ""
        met.set()
        return lost(group)

    assert both(tmp_path, run)[0].startswith("the exchange with the other ranks failed: ")
