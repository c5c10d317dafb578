"""Architectures that kvloom's attention cannot serve are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import EOS, VOCAB, save_tokenizer
from tests.exec.loading import refusal


def make(path: Path, kind: str, maker: Any = transformers.AutoModelForCausalLM, **config: Any) -> Path:
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
    return path


def test_latent_attention(tmp_path: Path) -> None:
    path = make(
        tmp_path,
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    assert "latent attention" in refusal(path)


def test_recurrent_layers(tmp_path: Path) -> None:
    path = make(tmp_path, "MambaConfig", state_size=4, num_hidden_layers=2)
    assert "does not use transformers' attention interface" in refusal(path)


def test_layers_that_drop_what_attention_needs(tmp_path: Path) -> None:
    path = make(tmp_path, "StableLmConfig", num_key_value_heads=2)
    assert "its layers do not pass on what kvloom's attention needs" in refusal(path)


def test_attention_sinks(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    path = make(tmp_path, "GptOssConfig", num_key_value_heads=2, head_dim=16, sliding_window=24, **experts)
    assert "attention sinks" in refusal(path)


def test_layers_of_both_kinds(tmp_path: Path) -> None:
    path = make(
        tmp_path,
        "Lfm2Config",
        num_hidden_layers=3,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        block_ff_dim=48,
    )
    assert "only 1 of its 3 layers are attention" in refusal(path)


def test_encoder_decoder(tmp_path: Path) -> None:
    path = make(
        tmp_path,
        "T5Config",
        transformers.AutoModelForSeq2SeqLM,
        d_model=32,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    assert "encoder-decoder" in refusal(path)
