"""Models whose linear layers hold few bits: their tokens are those of the dequantised model, and inputs that
are rounded change little."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import kvloom
from kvloom.exec.attention import Modular
from kvloom.exec.cpu import small_batch
from kvloom.exec.cpu.decoder import FusedDecoder
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.cpu.fuse import FusedRMSNorm, round_inputs
from kvloom.exec.cpu.quantized import PackedQuantizedLinear, pack_quantized
from kvloom.exec.fuse import MergedLinearPart
from kvloom.exec.loader import Observer, prove
from kvloom.exec.quantized import Bits, QuantizedLinear, QuantizedWeight, put_quantized, quantized
from kvloom.kernels.cpu.decode_step import step
from kvloom.types.geometry import Geometry
from tests.checkpoints import VOCAB, make_checkpoint
from tests.exec.batches import Batch, on_threads

DEMOS = Path(kvloom.__file__).parent / "demo"
FUSED = ("llama", "qwen2", "qwen3", "mistral")
OTHERS = ("gemma2", "phi3", "olmo2", "granite", "gpt_neox", "phi", "cohere")


def load(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def weights_of(model: nn.Module, bits: Bits, group: int | None = 32) -> dict[str, QuantizedWeight]:
    """Those of the linear layers in the blocks; group None: the longest that fits."""
    return {
        name: quantized(one.weight, bits, group or (32 if one.in_features % 32 == 0 else 16))
        for name, one in model.named_modules()
        if type(one) is nn.Linear and any(map(str.isdigit, name.split(".")))
    }


def served(path: Path, weights: dict[str, QuantizedWeight]) -> tuple[Any, FusedDecoder | None]:
    """The model as the loader makes it, with exact products yet."""
    model = load(path)
    put_quantized(model, weights)
    observer = prove(model, None, CPU)
    CPU.settle(model)
    heads, size = next(iter(observer.layers.values()))
    geometry = Geometry(len(observer.layers), heads, size, 4, 16384)
    decoder = CPU.fuse_decoder(model, observer.scorings, geometry)
    assert decoder is None or isinstance(decoder, FusedDecoder)
    return model, decoder


def dequantised(path: Path, weights: dict[str, QuantizedWeight]) -> Any:
    model = load(path)
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight.dequantized())
    return model


def logits(model: Any, ids: Tensor) -> Tensor:
    positions = torch.arange(len(ids))[None]
    found: Tensor = model(input_ids=ids[None], position_ids=positions, use_cache=False, kv=Observer()).logits
    return found[0]


def greedy(model: Any, ids: Tensor, count: int, **more: Any) -> Tensor:
    for _ in range(count):
        found = model(input_ids=ids[None], use_cache=False, **more).logits[0, -1:]
        ids = torch.cat((ids, found.argmax(-1)))
    return ids


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("architecture", [*FUSED, *OTHERS])
def test_tokens_are_those_of_the_dequantised_model(architecture: str, bits: Bits, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture, seed=bits)
    weights = weights_of(load(path), bits)
    model, decoder = served(path, weights)
    oracle = dequantised(path, weights)
    kinds = {type(one) for one in model.modules()}
    assert PackedQuantizedLinear in kinds
    assert QuantizedLinear not in kinds
    assert FusedRMSNorm in kinds or architecture in ("gpt_neox", "phi", "cohere")
    assert (decoder is not None) == (architecture in FUSED)
    ids = torch.randint(VOCAB, (17,), generator=torch.Generator().manual_seed(bits))
    with torch.inference_mode():
        expected = oracle(ids[None], use_cache=False).logits[0]
        found = logits(model, ids)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        tokens = greedy(oracle, ids, 12)
        assert greedy(model, ids, 12, kv=Observer()).equal(tokens)


def test_rounded_inputs_begin_after_the_proofs(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    weights = weights_of(load(path), 4)
    model, decoder = served(path, weights)
    assert decoder is not None
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = logits(model, ids)
        CPU.round_inputs(model)
        rounded = logits(model, ids)
    error = (rounded - whole).abs().max() / whole.abs().max()
    assert 1e-5 < error < 0.1
    parts = [one.product if isinstance(one, MergedLinearPart) else one for one in model.modules()]
    packed = [one for one in parts if isinstance(one, PackedQuantizedLinear)]
    assert packed
    assert not any(one.exact for one in packed)


def test_layers_of_unlike_forms_are_fused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    model = load(path)
    weights = weights_of(model, 4)
    finer = {
        name: quantized(model.get_submodule(name).weight, 8, 16)
        for name in weights
        if name.endswith(("v_proj", "down_proj"))
    }
    model, decoder = served(path, weights | finer)
    assert decoder is not None
    ids = torch.arange(9)
    with torch.inference_mode():
        expected = dequantised(path, weights | finer)(ids[None], use_cache=False).logits[0]
        assert (logits(model, ids) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_layers_that_are_quantised_in_part_are_served(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral")
    weights = {name: one for name, one in weights_of(load(path), 8).items() if "k_proj" not in name}
    model, _ = served(path, weights)
    ids = torch.arange(9)
    with torch.inference_mode():
        expected = dequantised(path, weights)(ids[None], use_cache=False).logits[0]
        assert (logits(model, ids) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("demo", ["guide", "stories", "sums"])
def test_rounded_inputs_say_nearly_the_same(demo: str, bits: Bits) -> None:
    """On text that the dequantised model writes: mean KL divergence below 0.002, perplexity within 0.5 %."""
    model = load(DEMOS / demo)
    put_quantized(model, weights_of(model, bits, None))
    torch.manual_seed(0)
    with torch.inference_mode():
        first = torch.randint(3, model.config.vocab_size, (8, 1))
        text = model.generate(first, max_new_tokens=100, min_new_tokens=100, do_sample=True, top_k=0)
        whole = model(text).logits.double().log_softmax(-1)
        pack_quantized(model)
        round_inputs(model)
        rounded = model(text).logits.double().log_softmax(-1)
    divergence = (whole.exp() * (whole - rounded)).sum(-1).mean()
    losses = [-one[:, :-1].gather(-1, text[:, 1:, None]).mean() for one in (whole, rounded)]
    worse = max(float((b - a).exp()) for a, b in pairwise(losses))
    print(f"{demo}, {bits} bits: KL {divergence:.5f}, perplexity {worse:.4f} times")
    assert 0 < divergence < 0.002
    assert 0.995 < worse < 1.005


FORMS = ("same", "finer", "head")
"""Which layers are of 8 bits in small groups beside others of 4: none, v and up, or the head alone."""


def of_form(path: Path, form: str, bits: Bits) -> tuple[Any, FusedDecoder, Geometry]:
    """Served over sizes that are no multiples of a panel's, with exact products yet."""
    model = load(path)
    weights = weights_of(model, bits)
    if form == "finer":
        finer = [name for name in weights if name.endswith(("v_proj", "up_proj"))]
        weights |= {name: quantized(model.get_submodule(name).weight, 8, 16) for name in finer}
    if form == "head":
        weights["lm_head"] = quantized(model.lm_head.weight, 8, 32)
    model, decoder = served(path, weights)
    assert decoder is not None
    heads, size = (
        model.config.num_key_value_heads,
        model.config.hidden_size // model.config.num_attention_heads,
    )
    return model, decoder, Geometry(model.config.num_hidden_layers, heads, size, 4, 16384)


def steps(forward: Any, geometry: Geometry, rows: int) -> list[Tensor]:
    """Logits of the first decode steps of the first sequences."""
    batch, tokens = Batch(geometry, rows), np.random.default_rng(0).integers(0, VOCAB, (6, 9))
    return [batch.forward(forward, given[:rows], [1] * rows, np.arange(rows)) for given in tokens]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_a_step_in_one_kernel_gives_what_its_layers_give(
    exact: bool, bits: Bits, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"intermediate_size": 160, "vocab_size": VOCAB + 13, "tie_word_embeddings": False}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model, decoder, geometry = of_form(make_checkpoint(tmp_path, "llama", **sizes, **odd), form, bits)
    if not exact:
        CPU.round_inputs(model)
    calls = list[int]()

    def counted(arguments: Any, threads: int) -> None:
        calls.append(threads)
        step(arguments, threads)

    monkeypatch.setattr(small_batch, "step", counted)
    found = {rows: steps(decoder, geometry, rows) for rows in (1, 2, 9)}
    for rows in (1, 2):  # a row is the same bits beside any others
        assert all(few.equal(many[:rows]) for few, many in zip(found[rows], found[9], strict=True))
    with on_threads(5):
        assert all(a.equal(b) for a, b in zip(steps(decoder, geometry, 9), found[9], strict=True))
    assert len(calls) == 4 * len(found[9])
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", 0)
    layered = steps(decoder, geometry, 9)
    assert len(calls) == 4 * len(found[9])
    bound = 1e-5 if exact else 1e-2  # an input between two codes
    for ours, theirs, modular in zip(found[9], layered, steps(Modular(model), geometry, 9), strict=True):
        assert (ours - theirs).abs().max() < bound * theirs.abs().max()
        assert (ours - modular).abs().max() < bound * modular.abs().max()
