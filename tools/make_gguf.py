"""Make a GGUF file of a checkpoint of tools/make_checkpoint.py, in its own number format or another.

python -m tools.make_gguf --checkpoint DIR --out FILE [--kind q8_0]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file
from tools.k_quants import BLOCK, q4_k, q6_k
from torch import Tensor

Kind = Literal["f16", "bf16", "q8_0", "q4_0", "q4_k_m"]

ARCHITECTURES: Final = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
"""By `model_type` of the checkpoint."""
_MERGED: Final = ("Ġ", "Ġ")
"""llama.cpp wants at least one merge, and these tokenizers have none."""
_ROPE_FACTORS: Final = "rope_freqs.weight"
_ROWS: Final = 4096  # that are quantised at once
_BLOCKS: Final = {Type.Q4_K: q4_k, Type.Q6_K: q6_k}
"""What writes the types that the package does not write."""


def make_gguf(checkpoint: Path, out: Path, kind: Kind | None = None) -> Path:
    """Writes the checkpoint, one of Llama's or Qwen3's architecture, as a GGUF file. kind: of its matrices,
    as llama.cpp's tools name it; None is the number format that they have. Raises ValueError for matrices
    that are too narrow for it."""
    config = json.loads((checkpoint / "config.json").read_text())
    model_type, layers = config["model_type"], config["num_hidden_layers"]
    architecture = ARCHITECTURES[model_type]
    weights = load_file(checkpoint / "model.safetensors")
    _check_widths(weights, kind)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    _add_tokenizer(writer, checkpoint)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor(_ROPE_FACTORS, _llama3_factors(config["rope_parameters"], config["head_dim"]))
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, weight in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        heads = _permuted_heads(stored, config) if model_type == "llama" else None
        ordered = weight if heads is None else _permuted(weight, heads)
        if kind is None or weight.dim() == 1:
            _add_tensor(writer, stored, ordered)
        else:
            form = _type_of(stored, kind, layers)
            writer.add_tensor(stored, _encoded(ordered, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _check_widths(weights: Mapping[str, Tensor], kind: Kind | None) -> None:
    """Raises ValueError if rows are no whole blocks of this kind."""
    block = BLOCK if kind == "q4_k_m" else 1 if kind is None else gguf.GGML_QUANT_SIZES[Type[kind.upper()]][0]
    for name, weight in weights.items():
        if weight.dim() > 1 and weight.shape[-1] % block:
            raise ValueError(
                f"{name} is {weight.shape[-1]} wide, and {kind} takes multiples of {block}; a checkpoint of "
                "such sizes or another kind is right"
            )


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Returns by what the frequencies of Llama 3.1 and later are divided, as llama.cpp's converter does."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return factors


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    read = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {one["content"] for one in read["added_tokens"]}
    ids: dict[str, int] = read["model"]["vocab"] | {one["content"]: one["id"] for one in read["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    tokens[-1] = "".join(_MERGED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(_MERGED)])
    writer.add_eos_token_id(ids["</s>"])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _permuted_heads(stored: str, config: dict[str, Any]) -> int | None:
    """Returns how many heads the rows of this tensor have if llama.cpp wants them in another order."""
    wanted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return next((heads for part, heads in wanted.items() if f".{part}." in stored), None)


def _permuted(weight: Tensor, heads: int) -> Tensor:
    """Returns the rows of each head as 0, D/2, 1, D/2 + 1, …, since llama.cpp rotates neighbours."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _type_of(stored: str, kind: Kind, layers: int) -> Type:
    """Returns the type that llama.cpp gives a matrix in a file of this kind. Q4_K_M has some in 6 bits."""
    if kind != "q4_k_m":
        return Type[kind.upper()]
    if stored in ("token_embd.weight", "output.weight"):
        return Type.Q6_K
    if not any(f".{part}." in stored for part in ("attn_v", "ffn_down")):
        return Type.Q4_K
    layer, eighth = int(stored.split(".")[1]), layers // 8
    exact = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return Type.Q6_K if exact else Type.Q4_K


def _encoded(weight: Tensor, form: Type) -> NDArray[Any]:
    """Returns the matrix in a type, some rows at a time."""

    def encode(rows: Tensor) -> NDArray[Any]:
        numbers = rows.float().numpy()
        found: NDArray[Any] = _BLOCKS[form](numbers) if form in _BLOCKS else gguf.quantize(numbers, form)
        return found

    return np.concatenate([encode(weight[at : at + _ROWS]) for at in range(0, len(weight), _ROWS)])


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    """llama.cpp wants vectors in float32."""
    if weight.dtype == torch.bfloat16 and weight.dim() > 1:
        numbers: NDArray[Any] = weight.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, weight.float().contiguous().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description="make a GGUF file of a random checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--kind", choices=get_args(Kind), help="of the matrices; as the checkpoint has them if none"
    )
    options = parser.parse_args()
    try:
        print(make_gguf(options.checkpoint, options.out, options.kind))
    except ValueError as error:
        raise SystemExit(f"{options.checkpoint}: {error}") from error


if __name__ == "__main__":
    main()
