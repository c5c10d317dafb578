"""Make a random checkpoint of a benchmark's shape: the speed of its layers is real, its words are not.

python tools/make_checkpoint.py --shape A --out DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

BYTES = 256
EOS, BOS = BYTES, BYTES + 1
SEED = 20240607


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 8192
    context: int = 4096
    head_dim: int = 64
    qwen: bool = False  # Qwen3, with norms of heads; else Llama
    rope: Mapping[str, float | str] | None = None  # transformers' `rope_parameters`; None is its default


_LLAMA3_ROPE: Final[Mapping[str, float | str]] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES = {
    "A": Shape(hidden=768, layers=12, heads=12, kv_heads=12, ffn=2048),
    "B": Shape(hidden=512, layers=6, heads=8, kv_heads=4, ffn=1408),
    "C": Shape(hidden=512, layers=6, heads=8, kv_heads=4, ffn=1408, vocab=32_000),
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 3072, vocab=151_936, head_dim=128, qwen=True),
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 8192, vocab=128_256, context=131_072, rope=_LLAMA3_ROPE),
}


def make_shape(path: Path, shape: str, *, seed: int = SEED, dtype: str = "float32") -> Path:
    """Write the checkpoint of SHAPES[shape] into `path`: one that transformers, vLLM and kvloom can load."""
    config = _config(SHAPES[shape], dtype)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.bos_token_id = BOS
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    _save_tokenizer(path, config.vocab_size, config.max_position_embeddings)
    return path


def _config(shape: Shape, dtype: str) -> LlamaConfig | Qwen3Config:
    kind = Qwen3Config if shape.qwen else LlamaConfig
    return kind(
        architectures=["Qwen3ForCausalLM" if shape.qwen else "LlamaForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rope_parameters=None if shape.rope is None else dict(shape.rope),
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=dtype,
    )


def _save_tokenizer(path: Path, vocab: int, context: int) -> None:
    """Byte-level without merges: every byte is a token; the rest of the vocabulary has names."""
    ids = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids |= {"</s>": EOS, "<s>": BOS}
    ids |= {f"w{i}": i for i in range(BOS + 1, vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", model_max_length=context
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast.save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="make a random checkpoint of a benchmark's shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    print(make_shape(options.out, options.shape, seed=options.seed, dtype=options.dtype))


if __name__ == "__main__":
    main()
