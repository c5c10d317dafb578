"""Experts that stand in the place of transformers' own give what these give, each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from kvloom.exec.cpu.fuse import fuse_on_cpu, round_inputs
from kvloom.exec.experts import Experts, split_experts
from kvloom.exec.quantized import Bits, linear_of, put_quantized, quantized
from kvloom.types.errors import ConfigError
from tests.checkpoints import config_of

COUNT, EACH, HIDDEN, INNER = 6, 3, 96, 64
PARTS = ("gate_proj", "up_proj", "down_proj")


def mixture(architecture: str, **changes: Any) -> Any:
    """A layer's experts with random weights, in a model of theirs alone."""
    sizes = {"num_experts": COUNT, "num_experts_per_tok": EACH, "hidden_size": HIDDEN}
    inner = {"moe_intermediate_size": INNER, "intermediate_size": INNER}
    config = config_of(architecture, num_hidden_layers=1, **(sizes | inner | changes))
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.eval().requires_grad_(False)
    return nn.ModuleDict({"experts": model.model.layers[0].mlp.experts})


def names(count: int = COUNT) -> list[str]:
    return [f"experts.{i}.{part}" for i in range(count) for part in PARTS]


def asked(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    weights, chosen = torch.randn(rows, COUNT, generator=random).softmax(-1).topk(EACH)
    return torch.randn(rows, HIDDEN, generator=random), chosen, weights


def with_bits(model: Any, bits: Bits) -> Any:
    """The same experts of few bits, and in `model` what they stand for."""
    gate_up, down = model["experts"].gate_up_proj, model["experts"].down_proj
    ours = nn.ModuleDict({"experts": model["experts"], "norm": nn.LayerNorm(1)}).requires_grad_(False)
    split_experts(ours, names())
    for i in range(COUNT):
        for part, matrix in zip(PARTS, (*gate_up[i].chunk(2), down[i]), strict=True):
            weight = quantized(matrix, bits, 32)
            matrix.copy_(weight.dequantized())
            put_quantized(ours, {f"experts.{i}.{part}": weight})
    return ours


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe"])
def test_they_give_what_the_dequantised_ones_give(architecture: str, bits: Bits) -> None:
    stock = mixture(architecture)
    ours = with_bits(stock, bits)
    inputs = asked(19)
    with torch.inference_mode():
        expected = stock["experts"](*inputs)
        assert torch.allclose(ours["experts"](*inputs), expected, rtol=1e-4, atol=1e-5)
        fuse_on_cpu(ours)
        assert torch.allclose(ours["experts"](*inputs), expected, rtol=1e-4, atol=1e-5)
        round_inputs(ours)
        found = ours["experts"](*inputs)
    assert 1e-5 < (found - expected).abs().max() / expected.abs().max() < 0.05


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_is_the_same_bits_beside_any_others(exact: bool) -> None:
    ours = with_bits(mixture("qwen3_moe"), 4)
    fuse_on_cpu(ours)
    if not exact:
        round_inputs(ours)
    x, chosen, weights = asked(60)
    with torch.inference_mode():
        whole = ours["experts"](x, chosen, weights)
        for some in (slice(0, 1), slice(7, 12), slice(59, 60), slice(None, None, 5)):
            assert ours["experts"](x[some], chosen[some], weights[some]).equal(whole[some])


def test_one_expert_twice() -> None:
    """A row's parts are added as often as it names them."""
    stock = mixture("qwen3_moe")
    ours = with_bits(stock, 8)
    x, _, weights = asked(4)
    chosen = torch.tensor([[5, 5, 0]] * 4)
    with torch.inference_mode():
        once = [ours["experts"][i](x) * weights[:, at, None] for at, i in enumerate((5, 5, 0))]
        assert torch.allclose(
            ours["experts"](x, chosen, weights), sum(once, torch.zeros(())), rtol=1e-4, atol=1e-4
        )


def test_half_precision_is_kept() -> None:
    ours = with_bits(mixture("qwen3_moe"), 8)
    x, chosen, weights = asked(5)
    with torch.inference_mode():
        found = ours["experts"](x.bfloat16(), chosen, weights)
        expected = ours["experts"](x, chosen, weights)
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_experts_of_another_form_are_left_as_they_are() -> None:
    """Their gate is no activation alone."""
    model = mixture("qwen3_moe")
    stock: Any = model["experts"]
    stock._apply_gate = lambda both: both.chunk(2, -1)[0].clamp(max=0.1) * both.chunk(2, -1)[1]
    split_experts(model, names())
    assert model["experts"] is stock
    with pytest.raises(ConfigError, match=r"experts.0.up_proj is quantised, and is no linear layer"):
        linear_of(model, "experts.0.up_proj", (INNER, HIDDEN))


def test_other_layers_are_left_as_they_are() -> None:
    model = mixture("qwen3_moe")
    split_experts(model, ["experts", "experts.gate_up_proj", "elsewhere.0.up_proj", "experts.0.other"])
    assert not isinstance(model["experts"], Experts)
