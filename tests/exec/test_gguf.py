"""Models in GGUF files: their numbers are what the package `gguf` says, their tokens those of transformers
over these numbers, and their tokenizers the original ones."""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import AddedToken
from torch import nn
from transformers import AutoModelForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

from kvloom.exec.checkpoint import WHOLE, open_checkpoint
from kvloom.exec.cpu import number_format
from kvloom.exec.cpu.decoder import FusedDecoder
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.cpu.linear import GatedMLP, HalfEmbedding, HalfLinear
from kvloom.exec.cpu.quantized import PackedQuantizedLinear, QuantizedEmbedding, QuantizedPanels
from kvloom.exec.gguf.architecture import read_config
from kvloom.exec.gguf.blocks import MappedEmbedding, map_embedding, read_plain, read_quantized
from kvloom.exec.gguf.header import read_header
from kvloom.exec.gguf.model import QuantizedRecords, fill, gguf_bytes
from kvloom.exec.gguf.tokenizer import read_tokenizer
from kvloom.exec.huggingface import outline
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.exec.quantized import QuantizedLinear
from kvloom.kernels.cpu.half import narrow_formats
from kvloom.types.spec import Dtype, ModelSpec
from tests.checkpoints import EOS, VOCAB, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.exec.loading import BLOCK, load
from tests.ggufs import (
    K_TYPES,
    KINDS,
    MIXTURES,
    TEMPLATE,
    WRITTEN,
    bpe_values,
    encoded,
    make_gguf,
    make_wide_gguf,
    name_of,
    random_blocks,
    stacked,
)
from tests.oracle import Oracle

TEXTS = (
    "the weaver's thread, 1024 times",
    " held  two   spaces\n\n and lines\t",
    "größer als 早 🧵 e\u0301",
    "</s>the<extra319> end",
)


def file_of(folder: Path, kind: Type, blocks: Any) -> Path:
    """A file with one matrix."""
    writer = gguf.GGUFWriter(folder / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "one.gguf"


# -- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*WRITTEN, *K_TYPES], ids=lambda kind: kind.name)
@given(seed=st.integers(0, 1 << 32), rows=st.integers(1, 5), wide=st.integers(1, 3))
def test_blocks_stand_for_what_the_format_says(
    kind: Type, tmp_path_factory: Any, seed: int, rows: int, wide: int
) -> None:
    """To the last bit in float32: the same products and sums in the same order."""
    rng = np.random.default_rng(seed)
    blocks = random_blocks((rows, 256 * wide), kind, rng)
    file = file_of(tmp_path_factory.mktemp("blocks"), kind, blocks)
    record = read_header(file).tensors["token_embd.weight"]
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    order = rng.permutation(rows)
    with file.open("rb") as opened:
        held = read_quantized(opened, record)
        turned = read_quantized(opened, record, order)
        plain = read_plain(opened, record, torch.float32)
        embedding = map_embedding(opened, record, torch.float32)
    assert held.dequantized().equal(expected)
    assert turned.dequantized().equal(expected[torch.from_numpy(order)])
    assert plain.equal(expected)
    tokens = torch.from_numpy(rng.integers(0, rows, (2, 7)))
    assert embedding(tokens).equal(expected[tokens])
    assert QuantizedEmbedding(QuantizedPanels(held), torch.float32)(tokens).equal(expected[tokens])


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_quantised_numbers_are_near_the_original(kind: Type, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 96)).astype(np.float32)
    file = file_of(tmp_path, kind, encoded(values, kind, rng))
    with file.open("rb") as opened:
        held = read_quantized(opened, read_header(file).tensors["token_embd.weight"])
    assert held.bits == (4 if kind in (Type.Q4_0, Type.Q4_1) else 8)
    assert float((held.dequantized() - torch.from_numpy(values)).abs().max()) < 0.5


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_plain_numbers(kind: Type, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32)
    blocks = gguf.quantize(values, kind)
    file = file_of(tmp_path, kind, blocks)
    with file.open("rb") as opened:
        found = read_plain(opened, read_header(file).tensors["token_embd.weight"], torch.float32)
    assert found.equal(torch.from_numpy(gguf.dequantize(blocks, kind)))


def test_a_large_matrix_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.gguf.blocks._CHUNK", 1000)
    blocks = random_blocks((19, 512), Type.Q4_K, np.random.default_rng(0))
    file = file_of(tmp_path, Type.Q4_K, blocks)
    with file.open("rb") as opened:
        held = read_quantized(opened, read_header(file).tensors["token_embd.weight"])
    assert held.dequantized().equal(torch.from_numpy(gguf.dequantize(blocks, Type.Q4_K)))


def test_the_header_is_what_the_package_reads(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", *WRITTEN)
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    values = {name: one.contents() for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(one) if isinstance(one, array) else one for name, one in ours.values.items()} == values
    places = {one.name: (one.shape, one.offset, one.nbytes) for one in ours.tensors.values()}
    assert places == {
        one.name: (tuple(reversed(one.shape.tolist())), one.data_offset, one.n_bytes)
        for one in theirs.tensors
    }


# -- tokens ---------------------------------------------------------------------------------------------


def serves_as(file: Path, source: Path, dtype: Dtype = "float32") -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 3, 25, 70)]

    async def serve() -> list[list[int]]:
        exact = (ModelSpec(name="m", path=str(file), dtype=dtype),)
        async with running(msgspec.structs.replace(spec_of({}), models=exact)) as engine:
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=12)) for p in prompts))
            return [answer.tokens[0] for answer in answers]

    oracle = Oracle(source)
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        oracle.check_at_once(prompt, tokens)


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_greedy_is_that_of_the_dequantised_model(architecture: str, tmp_path: Path) -> None:
    serves_as(*make_gguf(tmp_path, architecture, *WRITTEN, Type.F16))


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_greedy_over_blocks_of_256(architecture: str, tmp_path: Path) -> None:
    serves_as(*make_wide_gguf(tmp_path, architecture, *K_TYPES, Type.Q8_0))


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_a_file_that_is_not_quantised(kind: Type, tmp_path: Path) -> None:
    file, source = make_gguf(tmp_path, "qwen2", kind, tie_word_embeddings=True)
    serves_as(file, source)
    found = load(file)
    assert type(found.forward) is type(load(source).forward)  # our own layers, as from safetensors
    assert found.card.parameters == load(source).card.parameters
    own = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}[kind]
    assert read_config(read_header(file)).dtype == own


HALVES: tuple[tuple[Type, Dtype], ...] = ((Type.F16, "float16"), (Type.BF16, "bfloat16"))


def loaded_by_auto(
    file: Path, halves: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[LoadedModel, list[str]]:
    """The model, and what its load has said, on a machine that takes 1 second for float32 and `halves` for 16
    bits."""
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 12)
    monkeypatch.setattr(number_format, "measure", lambda own, depth: (halves, 1.0))
    said = list[str]()
    return load_model(ModelSpec(name="m", path=str(file)), BLOCK, CPU, progress=said.append), said


def products(loaded: LoadedModel, kind: type) -> int:
    return sum(isinstance(one, kind) for one in loaded.module.modules())


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_of_16_bits_keeps_them_where_that_is_quicker(
    tied: bool, kind: Type, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if getattr(torch, dtype) not in narrow_formats():
        pytest.skip(f"this processor does not widen {dtype}")
    file, source = make_gguf(tmp_path, "qwen3", kind, tie_word_embeddings=tied)
    serves_as(file, source, dtype)
    slower, said = loaded_by_auto(file, 1.5, monkeypatch)
    assert slower.card.dtype == "float32"
    assert said[0].startswith("model m: weights in float32: ")
    quicker, said = loaded_by_auto(file, 0.5, monkeypatch)
    assert said[0].startswith(f"model m: weights in {dtype}: ")
    assert isinstance(quicker.forward, FusedDecoder)
    assert quicker.kv_dtype == torch.float32
    module: Any = quicker.module
    assert module.lm_head.panels.dtype == getattr(torch, dtype)
    assert isinstance(module.model.embed_tokens, HalfEmbedding) == tied
    assert module.model.norm.weight.dtype == torch.float32  # as the file has it


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_plain_matrices_beside_quantised_ones_keep_their_16_bits(
    kind: Type, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if getattr(torch, dtype) not in narrow_formats():
        pytest.skip(f"this processor does not widen {dtype}")
    file, source = make_gguf(tmp_path, "llama", Type.Q8_0, kind, Type.Q4_1)
    serves_as(file, source, dtype)
    loaded, said = loaded_by_auto(file, 0.5, monkeypatch)
    assert said[0].startswith(f"model m: weights in {dtype}: ")
    assert loaded.kv_dtype == torch.float32
    assert products(loaded, HalfLinear)
    assert products(loaded, PackedQuantizedLinear)


def test_matrices_of_two_plain_formats_become_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is rounded unasked."""
    file, _ = make_gguf(tmp_path, "qwen2", Type.F16, Type.F16, Type.F32)
    loaded, said = loaded_by_auto(file, 0.5, monkeypatch)
    assert loaded.card.dtype == "float32"
    assert not said


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_that_are_dequantised_become_float32(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their modules would compute in 16 bits."""
    file, _ = make_gguf(tmp_path, architecture, Type.F16, Type.Q4_0)
    loaded, said = loaded_by_auto(file, 0.5, monkeypatch)
    assert (loaded.card.dtype, loaded.kv_dtype) == ("float32", torch.float32)
    assert not said


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_held_of_embedding_and_head(tied: bool, tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen2", Type.Q8_0, tie_word_embeddings=tied)
    loaded = load(file)
    module: Any = loaded.module
    assert isinstance(loaded.forward, FusedDecoder)
    assert isinstance(module.model.embed_tokens, QuantizedEmbedding if tied else MappedEmbedding)
    assert isinstance(module.lm_head, PackedQuantizedLinear)
    assert isinstance(module.model.layers[0].mlp.down, PackedQuantizedLinear)


def test_rotary_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 8, 8, 8, 8, 8], np.float32)
    file, source = make_gguf(tmp_path, "llama", Type.Q8_0, tensors={"rope_freqs.weight": factors})
    found: Any = load(file).module
    stock: Any = Oracle(source).model
    expected = stock.model.rotary_emb.inv_freq / torch.from_numpy(factors)
    assert found.model.rotary_emb.inv_freq.equal(expected)


@pytest.mark.parametrize(("kind", "original"), [("linear", None), ("yarn", 64)], ids=["linear", "yarn"])
def test_rotary_scaling(kind: str, original: int | None, tmp_path: Path) -> None:
    values = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    values |= {"rope.scaling.original_context_length": original} if original else {}
    extra = {f"llama.{key}": value for key, value in values.items()}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    rope |= {"original_max_position_embeddings": original} if original else {}
    serves_as(*make_gguf(tmp_path, "llama", Type.Q8_0, extra=extra, rope_parameters=rope))


def test_a_half_precision_over_quantised_weights(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", Type.Q8_0, Type.Q4_1)
    loaded = load(file, dtype="bfloat16")
    assert (loaded.card.dtype, loaded.kv_dtype) == ("bfloat16", torch.bfloat16)


# -- what is held, and what is told ---------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [WRITTEN, K_TYPES], ids=["written", "K"])
def test_the_bytes_that_are_announced_are_held(kinds: tuple[Type, ...], tmp_path: Path) -> None:
    file, _ = make_wide_gguf(tmp_path, "llama", *kinds)
    header = read_header(file)
    config = read_config(header)
    with file.open("rb") as opened:
        tensors = QuantizedRecords(opened, header, config)
        quantised = sum(one.nbytes for one in tensors.values())
    plain = sum(4 * one.elements for one in header.tensors.values() if len(one.shape) == 1)
    assert gguf_bytes(header, torch.float32) == quantised + plain


@pytest.mark.parametrize("architecture", MIXTURES)
def test_each_expert_is_held_in_the_bits_of_the_file(architecture: str, tmp_path: Path) -> None:
    """Routers, and matrices that the file has in 16 bits, are held in the number format asked for."""
    file, source = make_gguf(tmp_path, architecture, Type.Q4_0, Type.F16, num_hidden_layers=1)
    header, wanted = read_header(file), AutoModelForCausalLM.from_pretrained(source).state_dict()
    module = outline(read_config(header), torch.bfloat16)
    fill(module, header, torch.bfloat16, torch.float32)
    held, kinds = dict(module.named_parameters()), set()
    for name, numbers in wanted.items():
        if ".mlp.gate." in name:
            assert held[name].equal(numbers.to(torch.bfloat16))
        if ".experts." not in name:
            continue
        layer = name.rpartition(".")[0]
        for i, matrix in enumerate(numbers):
            gated = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, expected in gated if "gate_up" in name else (("down_proj", matrix),):
                linear: Any = module.get_submodule(f"{layer}.{i}.{part}")
                kinds.add(type(linear))
                if isinstance(linear, QuantizedLinear):
                    assert linear.quantized.bits == 4
                    assert linear.quantized.dequantized().equal(expected)
                else:
                    assert linear.weight.equal(expected.to(torch.bfloat16))
    assert kinds == {QuantizedLinear, nn.Linear}
    quantised = [one.quantized for one in module.modules() if isinstance(one, QuantizedLinear)]
    plain = {one.data_ptr(): one.nbytes for one in held.values()}
    assert gguf_bytes(header, torch.bfloat16) == sum(one.nbytes for one in quantised) + sum(plain.values())


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_round_their_inputs_as_other_layers_do(architecture: str, tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, architecture, Type.Q4_0)
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    found = dict[str, torch.Tensor]()
    for dtype in ("float32", "auto"):
        module: Any = load(file, dtype=dtype).module
        experts = module.model.layers[1].mlp.experts
        assert {type(one) for one in experts.children()} == {GatedMLP}
        packed = [one for one in module.modules() if isinstance(one, PackedQuantizedLinear)]
        assert {one.exact for one in packed} == {dtype == "float32"}
        with torch.inference_mode():
            found[dtype] = experts(
                torch.randn(40, 64, generator=torch.Generator().manual_seed(1)),
                (ids[:, None] + torch.arange(2)) % 4,
                torch.full((40, 2), 0.5),
            )
    error = (found["auto"] - found["float32"]).abs().max() / found["float32"].abs().max()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_which_nothing_is_quantised(architecture: str, tmp_path: Path) -> None:
    file, source = make_gguf(tmp_path, architecture, Type.BF16)
    found, expected = load(file, dtype="float32"), load(source, dtype="float32")
    assert {name for name, _ in found.module.named_parameters()} == {
        name for name, _ in expected.module.named_parameters()
    }


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_tensors_have_the_names_that_the_package_has(architecture: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, architecture)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(kinds[KINDS[architecture]], 3)
    for name in stacked({name: one.float().numpy() for name, one in load_file(source / WHOLE).items()}):
        assert name_of(name) == theirs.get_name(name, (".weight", ".bias"))


def test_each_tensor_is_read_once(tmp_path: Path) -> None:
    file, _ = make_wide_gguf(tmp_path, "qwen3", Type.Q8_0, vocab_size=4096)
    header = read_header(file)
    config = read_config(header)
    fill(outline(config, torch.float32), header, torch.float32, torch.float32)
    before = read_bytes()
    fill(outline(config, torch.float32), header, torch.float32, torch.float32)
    assert read_bytes() - before < 1.2 * file.stat().st_size


def read_bytes() -> int:
    """How many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen2", Type.Q8_0)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert open_checkpoint(str(file)).digest() == digest
    assert load(file, sha256=digest).card.parameters > 0


def test_the_card(tmp_path: Path) -> None:
    extra = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "tokenizer.ggml.eot_token_id": 9}
    file, source = make_gguf(tmp_path, "qwen3", Type.Q8_0, extra=extra)
    card, original = load(file).card, load(source).card
    assert card.eos_token_ids == (9, *original.eos_token_ids)
    assert (card.sampling.temperature, card.sampling.top_k) == (0.5, 7)
    assert card.chat_template == original.chat_template == TEMPLATE
    assert card.special_tokens == original.special_tokens
    alike = ("context_length", "vocab_size", "architecture", "parameters", "add_bos", "bos_token_id")
    assert [getattr(card, name) for name in alike] == [getattr(original, name) for name in alike]


def test_ends_that_the_values_do_not_name(tmp_path: Path) -> None:
    """Models are taught several, and files name one."""
    file, source = make_gguf(tmp_path, "qwen2", Type.Q8_0)
    values = bpe_values(source)
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens[310], kinds[310] = "<|endoftext|>", 3
    tokens[311], kinds[311] = "<|im_end|>", 1
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    file, _ = make_gguf(tmp_path / "again", "qwen2", Type.Q8_0, extra=extra)
    assert load(file).card.eos_token_ids == (EOS, 310)


@pytest.mark.parametrize(
    ("pre", "said", "adds"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False)]
)
def test_which_texts_begin_with_a_token(pre: str, said: bool | None, adds: bool, tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": said,
    }
    file, _ = make_gguf(tmp_path, "llama", Type.Q8_0, extra=extra)
    assert load(file).card.add_bos == adds


# -- tokenizers -----------------------------------------------------------------------------------------


def check_alike(file: Path, original: Any) -> None:
    found = read_tokenizer(read_header(file))
    assert found.get_vocab() == original.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = original(text, add_special_tokens=special)["input_ids"]
            assert found(text, add_special_tokens=special)["input_ids"] == ids
            assert found.decode(ids) == original.decode(ids)
    messages = [{"role": "user", "content": "weave"}]
    said = found.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == original.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    file, source = make_gguf(tmp_path, "qwen2", Type.Q8_0)
    check_alike(file, PreTrainedTokenizerFast.from_pretrained(source))


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "smollm"])
def test_ways_of_splitting(pre: str, tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen2", Type.Q8_0, extra={"tokenizer.ggml.pre": pre})
    found = read_tokenizer(read_header(file))
    split = [piece for piece, _ in found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("the 1024 threads")]
    digits = {"qwen2": ["Ġ", *"1024"], "llama-bpe": ["Ġ", "102", "4"], "tekken": ["Ġ", *"1024"]}
    assert split == ["the", *digits.get(pre, ["Ġ", *"1024"]), "Ġthreads"]
    composed = found.backend_tokenizer.normalizer is not None
    assert composed == (pre == "qwen2")


PIECES = (
    "▁",
    "t",
    "h",
    "e",
    "w",
    "a",
    "v",
    "r",
    "th",
    "the",
    "▁the",
    "we",
    "▁we",
    "av",
    "er",
    "▁weav",
    "▁weaver",
)


@pytest.mark.parametrize("spaced", [True, False])
def test_a_sentencepiece_tokenizer(spaced: bool, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<extra319>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0] * 259 + [-float(at) for at in range(len(PIECES))] + [0.0]
    extra = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": spaced,
    }
    file, _ = make_gguf(tmp_path, "llama", Type.Q8_0, extra=extra)
    ids = {token: at for at, token in enumerate(tokens)}
    pairs = [
        (score, token[:at], token[at:])
        for token, score in zip(PIECES, scores[259:], strict=False)
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    pairs.sort(key=lambda pair: -pair[0])
    original = LlamaTokenizer(
        vocab=ids, merges=[pair[1:] for pair in pairs], add_prefix_space=spaced, add_bos_token=True
    )
    original.add_tokens([AddedToken("<extra319>", normalized=False)])
    original.chat_template = TEMPLATE
    check_alike(file, original)
    assert load(file).card.add_bos
