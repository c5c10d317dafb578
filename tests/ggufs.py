"""Tiny GGUF files, made from tiny checkpoints with the package `gguf`, and the checkpoints that they stand
for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import EOS, VOCAB, make_checkpoint

Array = NDArray[Any]

KINDS: Final = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
MIXTURES: Final = ("mixtral", "qwen3_moe")
WRITTEN: Final = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
"""The types to which the package quantises; of the others it only knows what they stand for."""
K_TYPES: Final = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
_SIZES: Final = {"qwen3_moe": {"moe_intermediate_size": 64, "norm_topk_prob": True}}
"""What rows of experts must have for groups of 32, and what files of mixtures do not say."""
_WIDE: Final = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""A model whose rows are blocks of 256 numbers."""

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def name_of(weight: str) -> str:
    """The name in a GGUF file of a weight of transformers."""
    stem, leaf = weight.rsplit(".", 1)
    layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
    inner = stem if layer is None else stem.split(".", 3)[3]
    return (f"blk.{layer}." if layer else "") + f"{_NAMES[inner]}.{leaf}"


def stacked(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights with those of a layer's experts in one."""
    made: dict[str, Any] = {}
    for name, one in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            made[name] = one
        else:
            made.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = one
    return {
        name: np.stack([one[i] for i in sorted(one)]) if isinstance(one, dict) else one
        for name, one in made.items()
    }


def unstacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The opposite of `stacked`."""
    made: dict[str, torch.Tensor] = {}
    for name, one in weights.items():
        if one.dim() < 3:
            made[name] = one
        else:
            layer, part = name.split(".experts.")
            made |= {f"{layer}.experts.{i}.{part}": part_of.clone() for i, part_of in enumerate(one)}
    return made


def random_blocks(shape: tuple[int, ...], kind: Type, rng: np.random.Generator) -> Array:
    """Any blocks of a type, but that their scales are finite and small."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    halves = (208,) if kind == Type.Q6_K else (0, 2)
    for at in halves:
        scale = rng.uniform(1e-5, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def encoded(values: Array, kind: Type, rng: np.random.Generator) -> Array:
    """A matrix in a type, as a writer takes it."""
    if kind in K_TYPES:
        return random_blocks(values.shape, kind, rng)
    made: Array = gguf.quantize(values, kind)
    return made


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of this tensor of Llama's are permuted in."""
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in name else None


def permuted(rows: Array, heads: int) -> Array:
    """The rows as Llama's files have them: 0, D/2, 1, D/2 + 1, … of each head."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: Array, heads: int) -> Array:
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def make_gguf(
    folder: Path,
    architecture: str,
    *kinds: Type,
    extra: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    tensors: Mapping[str, Array] | None = None,
    **changes: Any,
) -> tuple[Path, Path]:
    """Writes a GGUF file whose matrices have these types in turn. Returns it and the checkpoint of what it
    stands for. extra: further values, and None for those that are left out; tensors: further ones."""
    rng = np.random.default_rng(0)
    source = make_checkpoint(folder / "source", architecture, **(_SIZES.get(architecture, {}) | changes))
    save_bpe(source)
    config = json.loads((source / "config.json").read_text())
    weights = {name: one.float().numpy() for name, one in load_file(source / "model.safetensors").items()}
    kind = KINDS[architecture]
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, kind)
    values = _values(kind, config) | (bpe_values(source) if tokenizer else {}) | dict(extra or {})
    for key, value in values.items():
        put_value(writer, key, value)
    stands_for: dict[str, torch.Tensor] = {}
    for at, (weight, numbers) in enumerate(sorted(stacked(weights).items())):
        name = name_of(weight)
        heads = _heads(name, config) if kind == "llama" else None
        stored = numbers if heads is None else permuted(numbers, heads)
        if numbers.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(stored))
            stands_for[weight] = torch.from_numpy(numbers)
            continue
        chosen = kinds[at % len(kinds)]
        if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = Type.Q8_0  # as quantising programs do where a row is no multiple of 256
        blocks = encoded(np.ascontiguousarray(stored), chosen, rng)
        writer.add_tensor(name, blocks, raw_dtype=chosen)
        meant = gguf.dequantize(blocks, chosen)
        stands_for[weight] = torch.from_numpy(
            np.ascontiguousarray(meant if heads is None else unpermuted(meant, heads))
        )
    for name, one in (tensors or {}).items():
        writer.add_tensor(name, one)
    _close(writer)
    save_file(unstacked(stands_for), source / "model.safetensors", metadata={"format": "pt"})
    return file, source


def make_wide_gguf(folder: Path, architecture: str, *kinds: Type, **changes: Any) -> tuple[Path, Path]:
    """The same with rows that are long enough for blocks of 256 numbers."""
    wide = _WIDE | ({"moe_intermediate_size": 256} if architecture == "qwen3_moe" else {})
    return make_gguf(folder, architecture, *kinds, **(wide | changes))


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value of the type that it has, unless it is None."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _values(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    return {
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.expert_count": config.get("num_experts", config.get("num_local_experts")),
        f"{kind}.expert_used_count": config.get("num_experts_per_tok"),
        f"{kind}.expert_feed_forward_length": config.get("moe_intermediate_size"),
        f"{kind}.attention.head_count": heads,
        f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{kind}.attention.sliding_window": config.get("sliding_window") if kind == "llama" else None,
        f"{kind}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        f"{kind}.rope.dimension_count": head_dim,
        "tokenizer.ggml.eos_token_id": EOS,
    }


TEXT: Final = (
    "the weaver wove the thread, and the thread held the weave; other threads were woven 1,024 times"
)
TEMPLATE: Final = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_bpe(folder: Path, vocab: int = VOCAB) -> None:
    """A byte-level tokenizer with merges, learned from a sentence, for a checkpoint's folder."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=EOS + 40, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator([TEXT], trainer)
    merges = [tuple(one) for one in json.loads(learner.to_str())["model"]["merges"]]
    tokens = [*alphabet, "</s>", *dict.fromkeys(left + right for left, right in merges)]
    tokens += [f"<extra{i}>" for i in range(len(tokens), vocab)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([AddedToken("<extra319>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def bpe_values(folder: Path) -> dict[str, Any]:
    """The values of a byte-level tokenizer that lies in a checkpoint's folder."""
    read = json.loads((folder / "tokenizer.json").read_text())
    added = {one["content"]: one["special"] for one in read["added_tokens"]}
    ids = read["model"]["vocab"] | {one["content"]: one["id"] for one in read["added_tokens"]}
    tokens = sorted(ids, key=lambda token: int(ids[token]))
    template = folder / "chat_template.jinja"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{True: 3, False: 4, None: 1}[added.get(token)] for token in tokens],
        "tokenizer.ggml.merges": [" ".join(one) for one in read["model"]["merges"]],
        "tokenizer.chat_template": template.read_text() if template.is_file() else None,
    }
