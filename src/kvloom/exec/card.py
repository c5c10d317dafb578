"""The card of a model: the facts that clients are told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvloom.exec.huggingface import AutoTokenizer, cached_file
from kvloom.types.errors import ConfigError
from kvloom.types.request import ModelCard, SamplingDefaults
from kvloom.types.spec import ModelSpec

_FILE = "generation_config.json"
_LENGTHS = "max_position_embeddings", "max_seq_len", "seq_length"  # what families call it


def read_sampling_defaults(path: str) -> SamplingDefaults:
    """Returns what the checkpoint's generation_config.json itself says; transformers' class would add
    defaults of its own."""
    file = cached_file(path, _FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return SamplingDefaults()
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"its {_FILE} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"its {_FILE} is no object")
    names = SamplingDefaults.__struct_fields__
    wishes: dict[str, Any] = {name: said[name] for name in names if said.get(name) is not None}
    if said.get("do_sample") is False:
        wishes["temperature"] = 0.0
    try:
        return msgspec.convert(wishes, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its {_FILE}: {error}") from error


def read_tokenizer(folder: str) -> Any:
    """Returns the tokenizer in a checkpoint's folder, as transformers reads it."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ConfigError if the tokenizer does not serve."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("its tokenizer has no fast form (tokenizer.json)")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of no files at all
        raise ConfigError("it has no tokenizer (tokenizer.json)")


def card_of(
    spec: ModelSpec,
    module: Any,
    parameters: int,
    tokenizer: Any,
    sampling: SamplingDefaults,
    kv_dtype: str,
) -> ModelCard:
    """Returns the card of a model that was loaded. kv_dtype: the form of its K and V. Raises ConfigError if
    its tokenizer does not serve."""
    config = module.config
    check_tokenizer(tokenizer)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: str(getattr(tokenizer, name)) for name in names if getattr(tokenizer, name, None)}
    generation = getattr(module, "generation_config", None)  # encoders have none
    stops = _ids(getattr(generation, "eos_token_id", None)) | _ids(getattr(config, "eos_token_id", None))
    stops |= _ids(tokenizer.eos_token_id)
    encoded = tokenizer("a")["input_ids"]
    return ModelCard(
        name=spec.name,
        path=str(spec.path),
        context_length=_context(config, spec.max_context),
        vocab_size=config.vocab_size,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        chat_template=template,
        special_tokens=special,
        eos_token_ids=tuple(sorted(stop for stop in stops if stop < config.vocab_size)),
        bos_token_id=tokenizer.bos_token_id,
        add_bos=bool(encoded) and encoded[0] == tokenizer.bos_token_id is not None,
        architecture=type(module).__name__,
        parameters=parameters,
        dtype=str(module.dtype).removeprefix("torch."),
        sampling=sampling,
        kv_dtype=kv_dtype,
    )


def _ids(given: int | list[int] | None) -> set[int]:
    if given is None:
        return set()
    return {given} if isinstance(given, int) else set(given)


def _context(config: Any, wanted: int | None) -> int:
    """Returns the length of the longest sequence. Rotary forms that change with the longest sequence of a
    batch (dynamic, longrope) are kept to the length up to which they do not change, or a neighbour's length
    would change a sequence's tokens. If layers attend within chunks, or queries are scaled from some position
    on, sequences end with the first chunk, or before that position."""
    said = (getattr(config, name, None) for name in _LENGTHS)
    length = next((int(one) for one in said if one), 4096)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        length = min(length, int(config.attention_chunk_size))
    if getattr(config, "attn_temperature_tuning", None):
        length = min(length, int(config.floor_scale) - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        length = min(
            length, int(original or getattr(config, "original_max_position_embeddings", None) or length)
        )
    return min(length, wanted) if wanted else length
