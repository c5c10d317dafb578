"""What clients are told of a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from kvloom.core.errors import ConfigError
from kvloom.core.request import ModelCard
from kvloom.core.spec import ModelSpec
from kvloom.model.sampling_defaults import read_sampling_defaults


def card_of(spec: ModelSpec, module: Any, parameters: int) -> ModelCard:
    """Raises ConfigError where the checkpoint has no tokenizer that serves."""
    config = module.config
    tokenizer = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("its tokenizer has no fast form (tokenizer.json)")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of no files at all
        raise ConfigError("it has no tokenizer (tokenizer.json)")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: str(getattr(tokenizer, name)) for name in names if getattr(tokenizer, name, None)}
    stops = _ids(module.generation_config.eos_token_id) | _ids(config.eos_token_id)
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
        sampling=read_sampling_defaults(str(spec.path)),
    )


def _ids(given: int | list[int] | None) -> set[int]:
    if given is None:
        return set()
    return {given} if isinstance(given, int) else set(given)


def _context(config: Any, wanted: int | None) -> int:
    """The longest sequence. Rotary forms that change with the longest of a batch (dynamic, longrope) are
    kept to the length up to which they do not, or a neighbour's length would change one's tokens."""
    length = int(getattr(config, "max_position_embeddings", None) or 4096)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        length = min(
            length, int(original or getattr(config, "original_max_position_embeddings", None) or length)
        )
    return min(length, wanted) if wanted else length
