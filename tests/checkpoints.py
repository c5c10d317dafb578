"""Tiny random checkpoints of many architectures, each a real directory that transformers can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 320
EOS = 256
WINDOW = 24

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GQA = {"num_key_value_heads": 2}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# name → (config class, what is special about it)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA | {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    "qwen2": ("Qwen2Config", _GQA),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 1, "head_dim": 24}),
    "mistral": ("MistralConfig", _GQA | {"sliding_window": WINDOW, "head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        _GQA
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4, "sliding_window": None}),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 4}),
    "granite": (
        "GraniteConfig",
        _GQA
        | {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "mixtral": ("MixtralConfig", _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _GQA
        | {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    "phi": ("PhiConfig", _GQA),
    "cohere": ("CohereConfig", _GQA),
    "stablelm": ("StableLmConfig", _GQA | {"use_qkv_bias": True}),
    "nemotron": ("NemotronConfig", _GQA | {"head_dim": 16}),
    "gptj": ("GPTJConfig", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256}),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "falcon": ("FalconConfig", {"multi_query": True, "bias": True}),
    "falcon_groups": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
    "gpt_oss": (
        "GptOssConfig",
        _GQA | {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        _GQA
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 160,
            "floor_scale": 161,
            "interleave_moe_layer_step": 2,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        _GQA
        | {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
            ],
            "sliding_window": WINDOW,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "olmoe": ("OlmoeConfig", _GQA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "llama_yarn": (
        "LlamaConfig",
        _GQA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


def config_of(architecture: str, **overrides: Any) -> Any:
    kind, special = ARCHITECTURES[architecture]
    return getattr(transformers, kind)(**(_SMALL | special | overrides))


def make_checkpoint(path: Path, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of `architecture` with a byte-level tokenizer into `path`."""
    config = config_of(architecture, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    save_tokenizer(path, config.vocab_size)
    return path


def save_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level tokenizer without merges: every byte is a token; the rest of `vocab` has names."""
    ids = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids["</s>"] = EOS
    ids.update({f"<extra{i}>": i for i in range(EOS + 1, vocab)})
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast.save_pretrained(path)


def make_repeating(path: Path, *, period: int = 10, seed: int = 0, layers: int = 3) -> Path:
    """Writes a checkpoint whose text goes round in circles of `period` tokens, a divisor of the vocabulary's
    size, and leaves them now and then if it is drawn with a temperature: a token's row in the head is the
    embedding of the one before it."""
    config = config_of("qwen2", max_position_embeddings=512, num_hidden_layers=layers)
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    places = torch.arange(config.vocab_size)
    after = places.view(-1, period).roll(-1, 1).flatten()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.randn_like(embedding))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        model.lm_head.weight[after] = 0.15 * embedding
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    save_tokenizer(path, config.vocab_size)
    return path
