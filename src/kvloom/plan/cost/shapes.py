"""Shapes of well-known models by name, and of any decoder by its checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvloom.types.errors import ConfigError, nearest
from kvloom.types.geometry import SCALED, Geometry, row_bytes

_KV_ITEMSIZES: Final = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
_Count = Annotated[int, Meta(ge=1, lt=2**31)]


class ModelShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder of `layers` like layers. If it is `gated`, the MLP has three matrices, not two; if it is
    `tied`, the head is the embedding. `itemsize` is the bytes of a weight. `kv_dtype` is the format of the
    numbers in the KV cache; None stands for numbers of `itemsize` bytes. `experts` is the number of a layer's
    MLPs, each `ffn` wide, of which a token goes through `active`."""

    layers: Annotated[int, Meta(ge=1, lt=4096)]
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    head_dim: _Count
    ffn: _Count
    vocab: _Count
    itemsize: Literal[1, 2, 4] = 2
    kv_dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"] | None = None
    gated: bool = True
    tied: bool = False
    experts: _Count = 1
    active: _Count = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that no decoder has."""
        if self.kv_heads > self.heads or self.active > self.experts:
            raise ValueError(
                f"{self.kv_heads} KV heads of {self.heads} heads, {self.active} of {self.experts} experts"
            )

    @property
    def attention_parameters(self) -> int:
        """Returns the number of weights of one layer's q, k, v and output matrices."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Returns the number of weights of one MLP."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        """Returns the number of weights of one layer's matrices."""
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of one token's K and V."""
        return 2 * self.layers * self.kv_heads * row_bytes(self.head_dim, *self._row)

    @property
    def _row(self) -> tuple[int, bool]:
        """Returns the bytes of a number in the KV cache, and whether rows have scales."""
        if self.kv_dtype is None:
            return self.itemsize, False
        return _KV_ITEMSIZES[self.kv_dtype], self.kv_dtype in SCALED

    def geometry(self, block_bytes: int) -> Geometry:
        itemsize, scaled = self._row
        return Geometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            itemsize=itemsize,
            block_bytes=block_bytes,
            scaled=scaled,
        )


CONFIG: Final = "config.json"

# What families call the same thing; the first that is there counts.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_FFN: Final = ("n_inner", "ffn_dim", "intermediate_size", "ffn_hidden_size")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_DTYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

# What a config.json does not say: its family does.
_TWO_MATRICES: Final = frozenset((
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron",
    "opt", "persimmon", "phi", "starcoder2",
))  # fmt: skip
_TIED: Final = frozenset((
    "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "mpt",
    "opt", "starcoder2",
))  # fmt: skip
_FOUR_TIMES: Final = frozenset(("bloom", "falcon", "mpt"))  # as wide as its input is an MLP of these


def _llama(layers: int, hidden: int, ffn: int, *, kv_heads: int = 0, vocab: int = 32000) -> ModelShape:
    heads = hidden // 128
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=128,
        ffn=ffn,
        vocab=vocab,
    )


def _opt(layers: int, hidden: int) -> ModelShape:
    heads = hidden // 128
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        ffn=4 * hidden,
        vocab=50272,
        gated=False,
        tied=True,
    )


SHAPES: Final[dict[str, ModelShape]] = {
    "llama-7b": _llama(32, 4096, 11008),
    "llama-13b": _llama(40, 5120, 13824),
    "llama-30b": _llama(60, 6656, 17920),
    "llama-65b": _llama(80, 8192, 22016),
    "llama2-70b": _llama(80, 8192, 28672, kv_heads=8),
    "llama3-8b": _llama(32, 4096, 14336, kv_heads=8, vocab=128256),
    "llama3-70b": _llama(80, 8192, 28672, kv_heads=8, vocab=128256),
    "mistral-7b": _llama(32, 4096, 14336, kv_heads=8),
    "opt-13b": _opt(40, 5120),
    "opt-30b": _opt(48, 7168),
    "opt-66b": _opt(64, 9216),
}


def find_shape(name: str) -> ModelShape:
    """Returns a well-known model's shape, by its name in any case. Raises ConfigError."""
    found = SHAPES.get(name.lower())
    if found is None:
        hint = nearest(name.lower(), [*SHAPES], likeness=0.8)
        raise ConfigError(f"no shape is known of {name[:60]!r}; {hint} (or `path`, a checkpoint's folder)")
    return found


def read_shape(checkpoint: Path, itemsize: int | None = None) -> ModelShape:
    """Returns the shape of the decoder in a checkpoint's directory. `itemsize` is the bytes of a number if
    the model is not served in the format in which it was saved. Raises ConfigError naming the file and what
    it lacks."""
    config = _read_config(checkpoint)
    try:
        return shape_from_config(config, itemsize)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint / CONFIG}: {error.message}") from error


def read_context(checkpoint: Path) -> int | None:
    """Returns the tokens of the longest sequence of the model in a checkpoint's directory; None if its config
    does not say. Raises ConfigError for a config that cannot be read."""
    return _maybe(_decoder(_read_config(checkpoint)), ("max_position_embeddings",))


def _read_config(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / CONFIG
    try:
        config = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a checkpoint's directory is right") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no JSON ({error}); a checkpoint's config is right") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: a JSON object is right")
    return config


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a config says of a decoder; for a model that sees or hears, what it says of the part that
    speaks."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    return {**{key: config[key] for key in ("dtype", "torch_dtype") if key in config}, **nested}


def shape_from_config(config: Mapping[str, Any], itemsize: int | None = None) -> ModelShape:
    """Returns the shape that a config.json describes. Raises ConfigError saying what is missing, or what of
    it no shape can say."""
    config = _decoder(config)
    _refuse(config)
    family = str(config.get("model_type", ""))
    hidden, heads = _count(config, _HIDDEN), _count(config, _HEADS)
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if one else _maybe(config, _KV_HEADS) or heads
    experts = _maybe(config, _EXPERTS) or 1
    ffn = _maybe(config, ("moe_intermediate_size",)) if experts > 1 else None
    if ffn is None and "n_embd" in config:  # GPT-2's kin, which may leave it open
        ffn = _maybe(config, ("n_inner",)) or 4 * hidden
    if family in _FOUR_TIMES:
        ffn = _maybe(config, ("ffn_hidden_size",)) or 4 * hidden
    return _checked(
        {
            "layers": _count(config, _LAYERS),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": _maybe(config, ("head_dim",)) or hidden // heads,
            "ffn": ffn or _count(config, _FFN),
            "vocab": _count(config, ("vocab_size",)),
            "itemsize": itemsize or _itemsize(config),
            "gated": family not in _TWO_MATRICES,
            "tied": bool(config.get("tie_word_embeddings", family in _TIED)),
            "experts": experts,
            "active": _count(config, _ACTIVE) if experts > 1 else 1,
        }
    )


def _checked(fields: Mapping[str, object]) -> ModelShape:
    try:
        return msgspec.convert(fields, ModelShape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no decoder has this shape: {error}") from error


def _refuse(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for what a shape cannot say, which must not be left out of the bill unseen."""
    if config.get("is_encoder_decoder"):
        raise ConfigError("an encoder-decoder; a decoder is right")
    if config.get("quantization_config"):
        raise ConfigError("its weights are quantised, and a shape has one number format for all")
    if config.get("kv_lora_rank"):
        raise ConfigError("latent attention (kv_lora_rank); a shape has keys and values of one width")
    steps = [config.get(name) or 1 for name in ("decoder_sparse_step", "interleave_moe_layer_step")]
    if config.get("mlp_only_layers") or max(steps) > 1:
        raise ConfigError("only some of its layers are mixtures of experts; a shape's layers are all alike")
    kinds = {kind for kind in config.get("layer_types") or () if "attention" not in str(kind)}
    kinds |= {kind for kind in config.get("layer_types") or () if "linear" in str(kind)}
    if kinds:
        raise ConfigError(f"layers without attention over a cache ({', '.join(sorted(map(str, kinds)))})")


def _count(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = _maybe(config, names)
    if found is None:
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ConfigError(f"{names[0]}{others} is missing; a decoder's config has it")
    return found


def _maybe(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}: {str(value)[:40]!r}; a whole number from 1 on is right")
        return value
    return None


def _itemsize(config: Mapping[str, Any]) -> int:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return itemsize_of(dtype)


def itemsize_of(dtype: str) -> int:
    """Returns the bytes of a number in this format. Raises ConfigError."""
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: {dtype[:40]!r}; {', '.join(_DTYPES)} are right")
    return _DTYPES[dtype]
