"""What is no checkpoint for us is refused in one line that names the model; what is has a card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from kvloom.exec.cpu.executor import CPU, TorchExecutor
from kvloom.exec.loader import load_model
from kvloom.types.errors import ConfigError
from kvloom.types.request import SamplingDefaults
from kvloom.types.spec import ModelSpec
from tests.checkpoints import EOS, VOCAB, make_checkpoint, save_tokenizer
from tests.exec.loading import BLOCK, load, reconfigure, refusal


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path, "qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    return path


def test_a_missing_shard(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load(sharded).geometry.layers == 3
    shards[1].unlink()
    assert shards[1].name in refusal(sharded)


def test_a_missing_tensor(qwen: Path) -> None:
    rewrite(qwen, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    assert "lack model.layers.1.mlp.up_proj.weight" in refusal(qwen)


def test_a_tensor_of_the_wrong_shape(qwen: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    rewrite(qwen, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    assert f"{name} has shape [64, 95] in its files and [64, 96] in its config" in refusal(qwen)


def test_shapes_that_the_config_denies(qwen: Path) -> None:
    reconfigure(qwen, num_key_value_heads=4)
    assert "k_proj" in refusal(qwen)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refusal(empty)
    assert "nowhere" in refusal(tmp_path / "nowhere")
    refusal("no/such-repository-anywhere")
    refusal("a b c?*")
    file = tmp_path / "a-file"
    file.write_text("hello")
    assert "a-file" in refusal(file)


@pytest.mark.parametrize("text", ["{", "", "[]", "null", '{"model_type": "nonsense"}', "{}", "\0\1\2"])
def test_a_config_that_is_none(qwen: Path, text: str) -> None:
    (qwen / "config.json").write_text(text)
    refusal(qwen)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"num_attention_heads": -3},
        {"num_hidden_layers": 0},
        {"vocab_size": None},
        {"hidden_act": "nothing"},
        {"rope_parameters": {"rope_type": "nothing", "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense(qwen: Path, changes: dict[str, Any]) -> None:
    reconfigure(qwen, **changes)
    refusal(qwen)


@pytest.mark.parametrize("keep", [0, 7, 300, -100])
def test_weights_cut_short(qwen: Path, keep: int) -> None:
    whole = (qwen / "model.safetensors").read_bytes()
    (qwen / "model.safetensors").write_bytes(whole[:keep])
    refusal(qwen)


def test_a_tokenizer_that_is_broken_or_none(qwen: Path) -> None:
    (qwen / "tokenizer.json").write_text("{")
    refusal(qwen)
    for file in qwen.glob("tokenizer*"):
        file.unlink()
    assert "okenizer" in refusal(qwen)


@pytest.mark.parametrize("kind", ["their_own", "qwen2"])
def test_code_in_a_checkpoint_is_never_run(qwen: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    reconfigure(qwen, model_type=kind, auto_map=auto_map)
    (qwen / "code.py").write_text("raise SystemExit('it ran')")
    if kind == "qwen2":  # transformers has the class
        assert load(qwen).card.architecture == "Qwen2ForCausalLM"
    else:
        assert "it needs code of its own" in refusal(qwen)
    assert "trust" not in capfd.readouterr().out


def test_a_block_too_small_for_a_token(qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.mine: block_bytes: 64 holds no token of head size 16"):
        load_model(ModelSpec(name="mine", path=str(qwen)), 64, CPU)


def test_a_pool_too_small_for_a_page(qwen: Path) -> None:
    spec = ModelSpec(name="mine", path=str(qwen))
    with pytest.raises(ConfigError, match="no page of mine; at least 12,288 for each unit are needed"):
        TorchExecutor.load([spec], kv_bytes=5 * BLOCK, block_bytes=BLOCK, threads=1)
    TorchExecutor.load([spec], kv_bytes=6 * BLOCK, block_bytes=BLOCK, threads=1).close()


def test_the_context_is_bounded_by_the_config_and_by_the_person(qwen: Path) -> None:
    assert load(qwen).card.context_length == 256
    assert load(qwen, max_context=100).card.context_length == 100
    assert load(qwen, max_context=1000).card.context_length == 256


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
    ids=lambda rope: str(rope["rope_type"]) if isinstance(rope, dict) else "",
)
def test_a_rope_that_changes_with_the_longest_keeps_to_where_it_does_not(
    tmp_path: Path, rope: dict[str, Any], length: int
) -> None:
    both = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    assert load(make_checkpoint(tmp_path, "qwen2", rope_parameters=rope | both)).card.context_length == length


def test_the_card(qwen: Path) -> None:
    card = load(qwen).card
    assert (card.name, card.vocab_size, card.dtype, card.architecture) == (
        *("mine", VOCAB, "float32"),
        "Qwen2ForCausalLM",
    )
    assert (card.eos_token_ids, card.bos_token_id, card.add_bos) == ((EOS,), None, False)
    assert card.chat_template
    assert json.loads(card.tokenizer)["model"]["type"] == "BPE"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": EOS}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "temperature": None}, SamplingDefaults()),
        ({"do_sample": False, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
    ],
)
def test_sampling_as_the_checkpoint_wants_it(
    qwen: Path, said: dict[str, Any], wanted: SamplingDefaults
) -> None:
    (qwen / "generation_config.json").write_text(json.dumps(said))
    assert load(qwen).card.sampling == wanted


def test_sampling_that_cannot_be_is_refused_and_none_is_no_wish(qwen: Path) -> None:
    (qwen / "generation_config.json").write_text('{"temperature": -1}')
    assert "generation_config.json" in refusal(qwen)
    (qwen / "generation_config.json").unlink()
    assert load(qwen).card.sampling == SamplingDefaults()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_what_is_not_widened(tmp_path: Path, dtype: str) -> None:
    """Its embedding scales, so it computes in the format of its weights."""
    model = load(make_checkpoint(tmp_path, "gemma2"), dtype=dtype)
    assert model.card.dtype == dtype
    assert model.geometry.itemsize == 2
    assert model.geometry.tokens_per_block == 32


def refused(path: Path, kind: str, maker: Any = transformers.AutoModelForCausalLM, **config: Any) -> str:
    """Returns why a random model of this kind is refused."""
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    maker.from_config(getattr(transformers, kind)(**(base | config))).save_pretrained(path)
    save_tokenizer(path, VOCAB)
    return refusal(path)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("MambaConfig", {"state_size": 4}, "does not use transformers' attention interface"),
        ("Mamba2Config", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}, "does not use"),
        (
            "Qwen3NextConfig",
            {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
            "only 1 of its 4 layers are attention",
        ),
        ("FalconConfig", {"alibi": True}, "biases by distance (ALiBi)"),
        ("FalconH1Config", {"num_key_value_heads": 2}, "its layer 0 is of the kind hybrid"),
        ("Gemma4TextConfig", {"head_dim": 16, "num_key_value_heads": 2}, "its layers differ in KV heads"),
        (
            "Lfm2Config",
            {"num_hidden_layers": 3, "num_key_value_heads": 2, "block_ff_dim": 48}
            | {"layer_types": ["conv", "full_attention", "conv"]},
            "only 1 of its 3 layers are attention",
        ),
    ],
)
def test_attention_that_kvloom_does_not_have(
    tmp_path: Path, kind: str, config: dict[str, Any], why: str
) -> None:
    assert why in refused(tmp_path, kind, **config)


def test_layers_with_a_state_beside_keys_and_values(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in one piece would not show it."""
    stock = Qwen2DecoderLayer.forward

    def forward(self: Any, hidden_states: torch.Tensor, **named: Any) -> Any:
        return stock(self, hidden_states.cumsum(1), **named)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", forward)
    assert "its layers keep a state beside keys and values" in refusal(qwen)


def test_layers_that_count_or_cut_by_position_keep_to_where_they_do_not(tmp_path: Path) -> None:
    for i, (changes, length) in enumerate((({}, 160), ({"floor_scale": 100}, 99), ({"max_context": 50}, 50))):
        config = {name: value for name, value in changes.items() if name != "max_context"}
        path = make_checkpoint(tmp_path / str(i), "llama4", **config)
        assert load(path, max_context=changes.get("max_context")).card.context_length == length


@pytest.mark.parametrize(("architecture", "heads"), [("qwen2", 4), ("gpt_oss", 0), ("bloom", 0)])
def test_heads_with_sinks_or_slopes_are_not_offloaded(tmp_path: Path, architecture: str, heads: int) -> None:
    """A task in the mailbox does not tell them."""
    assert load(make_checkpoint(tmp_path, architecture)).heads == heads


def test_values_narrower_than_keys_take_as_much_room(tmp_path: Path) -> None:
    geometry = load(make_checkpoint(tmp_path, "deepseek_v3")).geometry
    assert (geometry.kv_heads, geometry.head_dim) == (4, 24)  # 8 of it rotated; a value has 12


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt_oss")
    reconfigure(path, quantization_config={"quant_method": "mxfp4"})
    assert "its quantization_config: quant_method: 'mxfp4'" in refusal(path)


def test_an_encoder_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    starts = {"decoder_start_token_id": 0, "pad_token_id": 0}
    why = refused(tmp_path, "T5Config", transformers.AutoModelForSeq2SeqLM, **sizes, **starts)
    assert "encoder-decoder" in why
