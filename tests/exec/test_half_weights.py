"""Weights of 16 bits on a CPU: held as they are, and computed with as float32 would with the same numbers."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import kvloom
from kvloom.exec.attention import Forward, Modular
from kvloom.exec.cpu import number_format, small_batch
from kvloom.exec.cpu.decoder import FusedDecoder
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.cpu.linear import GatedMLP, HalfEmbedding, HalfLinear, packed
from kvloom.exec.cpu.number_format import choose_format
from kvloom.exec.experts import Experts
from kvloom.exec.fuse import MergedLinearPart
from kvloom.exec.huggingface import children
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.exec.widened import WidenedEmbedding, WidenedLinear, can_widen, widen
from kvloom.kernels.cpu.half import narrow_formats
from kvloom.kernels.cpu.lanes.integers import HAS_BFLOAT16_DOT
from kvloom.types.address import KVForm
from kvloom.types.spec import ModelSpec
from tests.checkpoints import VOCAB, WINDOW, config_of, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.exec.batches import Batch
from tests.exec.loading import BLOCK, load, reconfigure
from tests.oracle import Oracle

FUSED = ("llama", "qwen2", "qwen3", "mistral")
OTHERS = ("cohere", "gpt_neox", "phi3")
MIXTURES = ("mixtral", "qwen3_moe")
LENGTHS = (1, 3, WINDOW + 1, 90, 130)  # past the window; more than a chunk, and than the rows of one kernel
COUNT = 16
DEMOS = Path(kvloom.__file__).parent / "demo"


def halved(path: Path, architecture: str, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A random checkpoint that was saved in 16 bits, whose biases and norms have values of their own."""
    if getattr(torch, dtype) not in narrow_formats():
        pytest.skip(f"this processor does not widen {dtype}")
    make_checkpoint(path, architecture, **changes)
    tensors = load_file(path / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.add_(0.3 * torch.randn(len(tensor), generator=torch.Generator().manual_seed(len(tensor))))
    saved = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
    reconfigure(path, dtype=dtype)
    return path


def served(path: Path, dtype: str, ranks: int = 1) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy answers, all asked for at once."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    spec = replace(
        spec_of({}, threads=2),
        models=(ModelSpec(name="m", path=str(path), dtype=dtype),),  # type: ignore[arg-type]
        chunk_tokens=128,
        tensor_parallel=ranks,
    )

    async def serve() -> list[tuple[list[int], list[int]]]:
        async with running(spec) as engine:
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=COUNT)) for p in prompts))
        return [(prompt, answer.tokens[0]) for prompt, answer in zip(prompts, answers, strict=True)]

    return asyncio.run(serve())


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((one, "bfloat16") for one in FUSED + OTHERS + MIXTURES),
        *((one, "float16") for one in ("llama", "qwen3", "qwen3_moe")),
    ],
)
def test_tokens_are_those_of_the_same_numbers_in_float32(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    path = halved(tmp_path, architecture, dtype)
    oracle = Oracle(path)  # reads them as float32
    for prompt, tokens in served(path, dtype):
        oracle.check_at_once(prompt, tokens)
        assert len(tokens) == COUNT


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_hold_16_bits(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody asks for them, where they are quicker."""
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 12)
    monkeypatch.setattr(number_format, "measure", lambda own, depth: (1.0, 2.0))
    model = load(halved(tmp_path, architecture))
    mixtures = [one for one in model.module.modules() if isinstance(one, Experts)]
    assert len(mixtures) == model.geometry.layers
    for gated in (gated for experts in mixtures for gated in experts):
        assert isinstance(gated, GatedMLP)
        for linear in (gated.gate, gated.up, gated.down):
            assert isinstance(linear, HalfLinear)
            assert linear.panels.dtype == torch.bfloat16
    assert model.kv_dtype == torch.float32


def test_tokens_over_two_ranks(tmp_path: Path) -> None:
    path = halved(tmp_path, "llama", num_key_value_heads=2, num_hidden_layers=2)
    oracle = Oracle(path)
    for prompt, tokens in served(path, "bfloat16", ranks=2):
        oracle.check_at_once(prompt, tokens)


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("limit", [0, 100])  # layer by layer, and all in one kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fused_decoder_gives_what_the_same_numbers_give_in_float32(
    tied: bool, dtype: str, limit: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are no multiples of a panel's, and inputs are of odd number where they can be."""
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", limit)
    odd = {"vocab_size": VOCAB + 13, "intermediate_size": 87, "num_hidden_layers": 2}
    path = halved(tmp_path, "qwen3", dtype, tie_word_embeddings=tied, **odd)
    half, whole = load(path, dtype=dtype), load(path, dtype="float32")
    assert isinstance(half.forward, FusedDecoder)
    lengths = [(7 * i) % 40 + 1 for i in range(rows)]
    kept = np.array([*range(0, rows, 2), rows - 1, 0])
    tokens = np.random.default_rng(rows).integers(0, VOCAB, (3, sum(lengths)))
    found = []
    for forward in (half.forward, Modular(half.module), Modular(whole.module)):
        batch = Batch(half.geometry, rows)
        answers = [batch.forward(forward, tokens[0], lengths, np.cumsum(lengths) - 1)]
        answers += [batch.forward(forward, tokens[i, :rows], [1] * rows, kept) for i in (1, 2)]
        found.append(answers)
    for fused, modular, expected in zip(*found, strict=True):
        bound = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(fused, expected, rtol=1e-4, atol=bound)
        torch.testing.assert_close(modular, expected, rtol=1e-4, atol=bound)


@pytest.mark.parametrize("limit", [0, 100])  # layer by layer, and all in one kernel
def test_rounded_inputs_begin_after_the_proofs(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways through a model then round; where nothing else differs, a rounding may go the other way."""
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", limit)
    model = load(halved(tmp_path, "qwen3"), dtype="bfloat16")
    lengths, kept = [5, 17, 1], np.arange(3)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, sum(lengths)))

    def answers(forward: Forward) -> torch.Tensor:
        batch = Batch(model.geometry, len(lengths))
        first = batch.forward(forward, tokens[0], lengths, np.cumsum(lengths) - 1)
        return torch.cat((first, batch.forward(forward, tokens[1, :3], [1] * 3, kept)))

    whole = answers(model.forward)
    CPU.round_inputs(model.module)
    rounded, modular = answers(model.forward), answers(Modular(model.module))
    most = whole.abs().max()
    assert (rounded - modular).abs().max() < 2e-3 * most
    for some in (rounded, rounded[3:], modular):  # the prompts, and a decode step by itself
        difference = (some - whole[-len(some) :]).abs().max() / most
        assert (1e-4 < difference < 2e-2) if HAS_BFLOAT16_DOT else difference < 1e-5


@pytest.mark.parametrize("demo", ["guide", "stories", "sums"])
def test_rounded_inputs_say_nearly_the_same(demo: str) -> None:
    """On text that the model writes: mean KL divergence below 0.0005, perplexity within 0.5 %."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMOS / demo, dtype=torch.bfloat16)
    widen(model)
    torch.manual_seed(0)
    with torch.inference_mode():
        first = torch.randint(3, model.config.vocab_size, (8, 1))
        text = model.generate(first, max_new_tokens=100, min_new_tokens=100, do_sample=True, top_k=0)
        whole = model(text).logits.double().log_softmax(-1)
        for parent, name, linear in list(children(model)):
            if isinstance(linear, WidenedLinear):
                setattr(parent, name, packed(linear))
        CPU.round_inputs(model)
        rounded = model(text).logits.double().log_softmax(-1)
    divergence = float((whole.exp() * (whole - rounded)).sum(-1).mean())
    losses = [-one[:, :-1].gather(-1, text[:, 1:, None]).mean() for one in (whole, rounded)]
    print(f"{demo}: KL {divergence:.6f}, perplexity {float((losses[1] - losses[0]).exp()):.5f} times")
    assert divergence < 0.0005
    assert 0.995 < float((losses[1] - losses[0]).exp()) < 1.005


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights, those in panels and in merged layers included; each memory once."""
    parts = [one.product if isinstance(one, MergedLinearPart) else one for one in module.modules()]
    held: dict[int, torch.Tensor] = {one.data_ptr(): one for one in module.parameters()}
    for one in parts:
        if isinstance(one, HalfLinear | HalfEmbedding):
            held[one.panels.address] = one.panels.data
        if isinstance(one, HalfLinear):
            held[one.bias.data_ptr()] = one.bias
    return sum(one.nbytes for one in held.values())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_held_once_in_16_bits(tied: bool, tmp_path: Path) -> None:
    path = halved(tmp_path, "qwen2", tie_word_embeddings=tied, hidden_size=128, intermediate_size=384)
    model = load(path, dtype="bfloat16")
    whole = model.card.parameters * 2
    assert whole <= held_bytes(model.module) <= whole * 1.03  # norms and biases are float32
    module: Any = model.module
    head, embedding = module.lm_head, module.get_input_embeddings()
    assert isinstance(head, HalfLinear)
    if tied:
        assert head.panels is embedding.panels
    else:
        assert isinstance(embedding, WidenedEmbedding)
        assert embedding.weight.dtype == torch.bfloat16
    assert not any(isinstance(one, WidenedLinear) for one in module.modules())


class AnonymousMemory(threading.Thread):
    """Watches this process's memory that is no file's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.now()
        self.peak = self.first
        self._over = threading.Event()

    @staticmethod
    def now() -> int:
        """Bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, self.now())

    def end(self) -> None:
        self._over.set()
        self.join()


def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    load(halved(tmp_path / "small", "llama"), dtype="bfloat16")  # which compiles what is not in the cache
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    path = halved(tmp_path / "large", "qwen2", **sizes)
    gc.collect()
    watch = AnonymousMemory()
    watch.start()
    try:
        model = load(path, dtype="bfloat16")
    finally:
        watch.end()
    stays = held_bytes(model.module)
    assert stays > 70 << 20
    assert watch.peak - watch.first < 1.15 * stays + (8 << 20)  # beside a layer's transients


def test_units_with_unlike_weights_have_k_and_v_of_one_form(tmp_path: Path) -> None:
    path = halved(tmp_path, "qwen3")

    def form(model: LoadedModel) -> KVForm:
        return KVForm.of(model.geometry, str(model.card.kv_dtype))

    half, whole = load(path, dtype="bfloat16"), load(path, dtype="float32")
    assert form(half) == form(whole)
    assert half.kv_dtype == whole.kv_dtype == torch.float32


def outline_of(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(config_of(architecture, **changes), dtype=dtype)
    return made


LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096}


@pytest.mark.parametrize(("halves", "chosen"), [(1.0, torch.bfloat16), (2.0, torch.float32)])
def test_auto_is_the_quicker_format_and_says_so(
    halves: float, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.dtype, int]] = []

    def measure(own: torch.dtype, depth: int) -> tuple[float, float]:
        asked.append((own, depth))
        return halves, 1.5

    monkeypatch.setattr(number_format, "measure", measure)
    said: list[str] = []
    assert choose_format(torch.bfloat16, outline_of("llama", **LARGE), said.append) == chosen
    assert asked[0][0] == torch.bfloat16
    (line,) = said
    assert line.startswith(f"weights in {str(chosen).removeprefix('torch.')}: ")


@pytest.mark.parametrize(
    ("architecture", "own", "sizes"),
    [
        ("llama", torch.float32, LARGE),
        ("llama", torch.bfloat16, {}),  # caches hold it
        ("gemma2", torch.bfloat16, LARGE),  # its embedding scales
    ],
)
def test_auto_is_float32_where_there_is_no_choice(
    architecture: str, own: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(own: torch.dtype, depth: int) -> tuple[float, float]:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(number_format, "measure", measure)
    said: list[str] = []
    assert choose_format(own, outline_of(architecture, own, **sizes), said.append) == torch.float32
    assert not said


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 16)
    halves, wholes = number_format.measure(torch.bfloat16, 100)
    assert 0 < halves < float("inf")
    assert 0 < wholes < float("inf")


def test_auto_asks_for_the_format_that_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 12)
    monkeypatch.setattr(number_format, "measure", lambda own, depth: (1.0, 2.0))
    path, said = halved(tmp_path, "qwen2"), list[str]()
    model = load_model(ModelSpec(name="mine", path=str(path)), BLOCK, CPU, progress=said.append)
    module: Any = model.module
    assert module.lm_head.panels.dtype == torch.bfloat16
    (line,) = said
    assert line.startswith("model mine: weights in bfloat16: ")


def test_auto_rounds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix is saved in float32, whatever the config says."""
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 12)
    monkeypatch.setattr(number_format, "measure", lambda own, depth: (1.0, 2.0))
    path, name = halved(tmp_path, "qwen2"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name].float() * 1.0001
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert not any(isinstance(one, HalfLinear) for one in load(path).module.modules())


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "mixtral"])
def test_what_cannot_be_widened(architecture: str) -> None:
    """It has an embedding that scales, layers that are not linear, or experts in one tensor."""
    assert not can_widen(outline_of(architecture))
    assert can_widen(outline_of("llama"))
