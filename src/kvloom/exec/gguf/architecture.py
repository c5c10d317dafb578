"""Reads what a GGUF file says of a model: its config in transformers' words, and the places of its tensors.

Every number of the config that decides over sizes is compared with tensors that the file has, so that no
module is made larger than the file. The keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; for the meaning of each see how llama.cpp's
convert_hf_to_gguf.py makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.exec.gguf.blocks import format_of
from kvloom.exec.gguf.header import GgufHeader, TensorRecord
from kvloom.exec.huggingface import AutoConfig, PretrainedConfig
from kvloom.types.errors import ConfigError

_MODEL_TYPES: Final = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""transformers' name of each architecture that is served. Mistral's files and Mixtral's say that they are
Llama's."""
_PERMUTED: Final = ("llama",)
"""The architectures whose rows of q and k stand in another order than transformers'."""

_FREQUENCIES: Final = "rope_freqs.weight"
_EMBEDDING: Final = "token_embd.weight"
_HEAD: Final = "output.weight"
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS: Final = {
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""Matrices [E, N, K] of all experts of a layer. transformers holds those of gates above those of ups."""
_EACH: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""An expert's own layers."""
_STACKED: Final = re.compile(r"(.*\.experts)\.(?:gate_up|down)_proj")
_ROUTER: Final = ".mlp.gate.weight"
_TENSOR: Final = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", re.ASCII)
_UNSERVED: Final = (
    *("attention.scale", "attention.clamp_kqv", "attention.temperature_scale", "attn_logit_softcapping"),
    *("final_logit_softcapping", "logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"),
    *("expert_shared_count", "expert_shared_feed_forward_length", "expert_weights_scale"),
    *("expert_group_count", "leading_dense_block_count", "interleave_moe_layer_step"),
)
"""Values of other models' architectures, without which one of them would be served wrongly."""
_MOST_CONTEXT: Final = 1 << 27
_MOST_HEADS: Final = 1 << 16
_MOST_EXPERTS: Final = 1 << 12  # of a layer
_SOFTMAX: Final = 1  # of `expert_gating_func`


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The place of one of transformers' weights: one tensor of the file or, rows after rows of each expert,
    several."""

    parts: tuple[TensorRecord, ...]

    @property
    def record(self) -> TensorRecord:
        """Returns the first tensor, which is the only one of all but experts."""
        return self.parts[0]

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, last = self.record.shape
        return (*outer[:-1], sum(one.shape[-2] for one in self.parts), last) if outer else (last,)

    @property
    def elements(self) -> int:
        return sum(one.elements for one in self.parts)


def model_name(tensor: str) -> str:
    """Returns the name that transformers has for a tensor of the file. Raises ConfigError if no architecture
    that is served has one of this name."""
    match = _TENSOR.fullmatch(tensor)
    if match and match[1] and match[2] in _EXPERTS and match[3] == "weight":
        return f"model.layers.{match[1]}.{_EXPERTS[match[2]]}"
    found = match and _NAMES.get(match[2])
    if not match or not found:
        raise ConfigError(f"its {tensor[:100]} is no tensor of the architectures that are served")
    return f"model.layers.{match[1]}.{found}.{match[3]}" if match[1] else f"{found}.{match[3]}"


def weights_of(header: GgufHeader) -> Mapping[str, StoredWeight]:
    """Returns the model's weights by the names that transformers has for them. A head that is the embedding
    has both names. Raises ConfigError."""
    parts: dict[str, list[TensorRecord]] = {}
    for name, record in header.tensors.items():
        if name != _FREQUENCIES:
            parts.setdefault(model_name(name), []).append(record)
    if _HEAD not in header.tensors and _EMBEDDING in header.tensors:
        parts[model_name(_HEAD)] = [header.tensors[_EMBEDDING]]
    in_order = attrgetter("name")  # gates before ups
    return {name: StoredWeight(tuple(sorted(some, key=in_order))) for name, some in parts.items()}


def with_experts_apart(weights: Mapping[str, StoredWeight]) -> Mapping[str, StoredWeight]:
    """Returns the weights with quantised experts apart: their stacked tensors become weights of the linear
    layers that `split_experts` makes of each expert. weights: their shapes fit."""
    apart = {
        match[1]
        for name, weight in weights.items()
        if (match := _STACKED.fullmatch(name)) and any(one.quantized for one in weight.parts)
    }
    made: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        match = _STACKED.fullmatch(name)
        if match is None or match[1] not in apart:
            made[name] = weight
            continue
        for stacked in weight.parts:
            layer = _EACH[stacked.name.split(".")[2]]
            for i in range(stacked.shape[0]):
                made[f"{match[1]}.{i}.{layer}.weight"] = StoredWeight((stacked.part(i),))
    return made


def is_quantized_linear(name: str, weight: StoredWeight) -> bool:
    """Returns whether the weight is that of a linear layer, or an embedding's, and quantised. name: as
    transformers has it. Routers are held in a plain number format."""
    record = weight.record
    return record.quantized and len(record.shape) == 2 and not name.endswith(_ROUTER)


def plain_formats(header: GgufHeader) -> Set[str]:
    """Returns the names of the formats of the matrices that are held as plain numbers. Those that are
    dequantised count as F32, in which nothing of them is rounded."""
    return {"F32" if record.quantized else record.type.name for record in _plain_matrices(header)}


def _plain_matrices(header: GgufHeader) -> Iterator[TensorRecord]:
    """Yields the matrices that are held as plain numbers."""
    for name, weight in weights_of(header).items():
        if len(weight.record.shape) > 1 and not is_quantized_linear(name, weight):
            yield from weight.parts


def row_order(name: str, header: GgufHeader, config: Any) -> NDArray[np.int64] | None:
    """Returns the place in the file of each row of a tensor, or None if the rows are in their order. name: as
    transformers has it.

    llama.cpp rotates neighbours of a head in Llama's models, and transformers rotates the halves of a head,
    so its rows are stored as 0, D/2, 1, D/2 + 1, …"""
    if header.architecture not in _PERMUTED or ".self_attn." not in name:
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return None
    rows = np.arange(heads * config.head_dim)
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def rotary_factors(header: GgufHeader, config: Any) -> TensorRecord | None:
    """Returns the tensor of the numbers by which the rotary frequencies are divided, or None if they are not.
    Raises ConfigError if it does not fit."""
    record = header.tensors.get(_FREQUENCIES)
    if record is not None and record.shape != (config.head_dim // 2,):
        raise ConfigError(
            f"its {_FREQUENCIES} has the shape {list(record.shape)}; [{config.head_dim // 2}] is right"
        )
    return record


def read_config(header: GgufHeader) -> PretrainedConfig:
    """Returns the model's config. Raises ConfigError if the architecture is not served, or the file does not
    say what it must, or says what its tensors contradict."""
    architecture = header.architecture
    if architecture not in _MODEL_TYPES:
        right = ", ".join(_MODEL_TYPES)
        raise ConfigError(f"its architecture is {architecture[:60]!r}; GGUF files of {right} are served")
    values = _Values(header)
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"its file lacks a matrix {_EMBEDDING}")
    hidden, heads = values.count("embedding_length"), values.count("attention.head_count", _MOST_HEADS)
    if hidden != embedding.shape[1]:
        raise ConfigError(
            f"its {architecture}.embedding_length is {hidden:,}, and its {_EMBEDDING} has rows of "
            f"{embedding.shape[1]:,} numbers"
        )
    rotated = values.maybe("rope.dimension_count")
    head_dim = values.maybe("attention.key_length") or rotated or hidden // heads
    if rotated not in (None, head_dim) or values.maybe("attention.value_length") not in (None, head_dim):
        raise ConfigError(
            "its heads are rotated in part, or their keys and values differ in size, which is not served"
        )
    for key in _UNSERVED:
        if key in values:
            raise ConfigError(f"its {architecture}.{key} is not served; a model without it is right")
    layers = values.count("block_count", len(header.tensors))
    window = values.maybe("attention.sliding_window")
    experts = _experts(values)
    kind = "mistral" if window and architecture == "llama" else _MODEL_TYPES[architecture]
    kind = "mixtral" if experts and architecture == "llama" else kind
    if window and kind not in ("mistral", "mixtral"):
        raise ConfigError(f"its {architecture}.attention.sliding_window is not served; none is right")
    return AutoConfig.for_model(
        kind,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=values.count("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=values.maybe("attention.head_count_kv") or heads,
        head_dim=head_dim,
        rms_norm_eps=values.real("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=values.count("context_length", _MOST_CONTEXT),
        rope_parameters=_rope(values),
        tie_word_embeddings=_HEAD not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        sliding_window=window,
        dtype=_own_format(header),
        **experts,
        **_special_ids(header, embedding.shape[0]),
    )


def _experts(values: _Values) -> dict[str, Any]:
    """Returns the values that a mixture's config has beside those of a plain model; none if it is no mixture.
    Raises ConfigError."""
    if not values.maybe("expert_count"):
        return {}
    kind = _MODEL_TYPES[values.architecture]
    if kind not in ("llama", "qwen3_moe"):
        raise ConfigError("it is a mixture of experts; of those qwen3moe and llama are served")
    count = values.count("expert_count", _MOST_EXPERTS)
    used = values.count("expert_used_count", count)
    if values.maybe("expert_gating_func") not in (None, 0, _SOFTMAX):
        raise ConfigError(f"its {values.architecture}.expert_gating_func is not served; softmax is right")
    if kind == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": used}
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "norm_topk_prob": values.maybe("expert_weights_norm") != 0,  # as llama.cpp does if it is not said
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


class _Values:
    """The values of the file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture = header.architecture
        self._prefix = self.architecture + "."

    def maybe(self, key: str) -> int | None:
        return self._header.count(self._prefix + key)

    def count(self, key: str, most: int = 1 << 24) -> int:
        """Returns the number at `key`. Raises ConfigError if there is none, or it is larger than `most`."""
        value = self.maybe(key)
        if value is None or not 1 <= value <= most:
            said = "missing" if value is None else f"{value:,}"
            raise ConfigError(f"its {self._prefix}{key} is {said}; a number from 1 to {most:,} is right")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._header.number(self._prefix + key)
        if value is None and default is None:
            raise ConfigError(f"its {self._prefix}{key} is missing")
        return float(value if value is not None else default or 0.0)

    def text(self, key: str) -> str | None:
        return self._header.text(self._prefix + key)

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._header.values


_TUNED: Final = ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow")


def _rope(values: _Values) -> dict[str, Any]:
    """Returns the rotary parameters. Raises ConfigError for a form that is not served."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values.real("rope.freq_base", 10_000.0)}
    kind = values.text("rope.scaling.type") or "none"
    if kind == "none":
        return rope
    tuned = [key for key in _TUNED if f"rope.scaling.{key}" in values]
    if kind not in ("linear", "yarn") or tuned:
        what = f"rope.scaling.{tuned[0]}" if tuned else f"rope.scaling.type {kind[:40]!r}"
        raise ConfigError(f"its {what} is not served; plain rotary frequencies, linear or yarn are right")
    rope |= {"rope_type": kind, "factor": values.real("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = values.count(
            "rope.scaling.original_context_length", _MOST_CONTEXT
        )
    return rope


def _own_format(header: GgufHeader) -> torch.dtype:
    """Returns the number format of most numbers of the matrices that are held as plain numbers; float32 if
    there are none."""
    sizes = {torch.float32: 0}
    for one in _plain_matrices(header):
        dtype = torch.float32 if one.quantized else format_of(one)
        sizes[dtype] = sizes.get(dtype, 0) + one.elements
    return max(sizes, key=lambda dtype: sizes[dtype])


_ENDS: Final = ("eos", "eot", "eom")
_END_TEXTS: Final = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
))  # fmt: skip
"""Tokens at which models stop, though a file's values name but one of them; llama.cpp stops there, too."""
_CONTROL: Final = 3  # of `tokenizer.ggml.token_type`


def _special_ids(header: GgufHeader, vocab: int) -> dict[str, Any]:
    """Returns the tokens that begin, pad and end texts. Raises ConfigError for one beyond the vocabulary."""
    found: dict[str, int] = {}
    for name in ("bos", "padding", *_ENDS):
        key = f"tokenizer.ggml.{name}_token_id"
        token = header.count(key)
        if token is not None and token >= vocab:
            raise ConfigError(f"its {key} is {token:,}, and its vocabulary has {vocab:,} tokens")
        if token is not None:
            found[name] = token
    tokens = header.texts("tokenizer.ggml.tokens") or ()
    kinds = header.numbers("tokenizer.ggml.token_type") or ()
    texts = {
        token
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and text in _END_TEXTS and token < vocab
    }
    ends = sorted(texts | {found[name] for name in _ENDS if name in found})
    return {
        "bos_token_id": found.get("bos"),
        "pad_token_id": found.get("padding"),
        "eos_token_id": ends or None,
    }
