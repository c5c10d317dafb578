"""Reads from a checkpoint's files how a model makes vectors: from sentence-transformers' own files beside the
weights, or from an architecture that classifies with one label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvloom.exec.checkpoint import CONFIG, MODULES, MOST_CONFIG, parsed
from kvloom.exec.huggingface import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from kvloom.types.errors import ConfigError
from kvloom.types.request import Task

_LENGTHS: Final = "sentence_bert_config.json"
_PROMPTS: Final = "config_sentence_transformers.json"
_CLASSIFIES: Final = "ForSequenceClassification"
_MAKES_TOKENS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SIGMOID: Final = ("Sigmoid",)
_NOTHING: Final = ("Identity",)

Mode = Literal["cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"]
MODES: Final[tuple[Mode, ...]] = ("cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean")
"""The ways in which a text's states become one vector, by sentence-transformers' names."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The way from a text's last hidden states to its vector or score."""

    task: Task
    mode: Mode | None = None
    """None if the model's own head does it."""
    normalized: bool = False
    """Whether vectors have the length 1."""
    sigmoid: bool = False
    """Whether a score is the sigmoid of the head's output."""
    most_tokens: int | None = None
    """The most tokens of a text; None for as many as the model has positions for."""
    lower: bool = False
    """Whether texts are to be in small letters."""
    prefix: str = ""
    """The text that is put in front of every text (the default prompt)."""


def read_pooling(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """Returns how the model makes vectors, by the files in the folder; None for a model that generates.
    Raises ConfigError for a way that is not served, and for an encoder whose files do not say how."""
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(_CLASSIFIES):
        return _scores(name, config)
    if (folder / MODULES).is_file():
        return _embeds(folder)
    if config.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not name.endswith(_MAKES_TOKENS):
        raise ConfigError(
            f"it is an encoder ({name or config.get('model_type')}), and no file says how its states become "
            f"a vector; sentence-transformers' {MODULES} and 1_Pooling/{CONFIG} are right"
        )
    return None


def _scores(name: str, config: Mapping[str, Any]) -> Pooling:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ConfigError(f"it tells {count} classes apart ({name}); one label, which is a score, is right")
    own = config.get("sentence_transformers")
    said = own.get("activation_fn") if isinstance(own, dict) else None
    said = str(said or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if said not in (*_SIGMOID, *_NOTHING):
        raise ConfigError(f"its scores are to pass {said[:60]}; Sigmoid or Identity is right")
    return Pooling("score", sigmoid=said in _SIGMOID)


def _embeds(folder: Path) -> Pooling:
    modules = _read(folder, MODULES, list)
    kinds = [(_kind(module), module) for module in modules]
    named = [kind for kind, _ in kinds]
    if named[:2] != ["Transformer", "Pooling"] or named[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"its {MODULES} has {', '.join(named)[:200] or 'nothing'}; Transformer, Pooling and perhaps "
            "Normalize are right"
        )
    if kinds[0][1].get("path", "") not in ("", "."):
        raise ConfigError(f"its {MODULES} has the Transformer in a folder; beside {MODULES} is right")
    config = _read(folder, f"{_folder_of(kinds[1][1])}/{CONFIG}", dict)
    prefix = _default_prompt(folder)
    if prefix and config.get("include_prompt") is False:
        raise ConfigError(
            f"its default prompt is not to be pooled; include_prompt: true is right in {CONFIG}"
        )
    lengths = _read(folder, _LENGTHS, dict) if (folder / _LENGTHS).is_file() else {}
    most = lengths.get("max_seq_length")
    return Pooling(
        "embed",
        _mode(config),
        normalized=len(named) > 2,
        most_tokens=most if isinstance(most, int) and most > 0 else None,
        lower=lengths.get("do_lower_case") is True,
        prefix=prefix,
    )


def _default_prompt(folder: Path) -> str:
    """Returns the prompt that sentence-transformers puts in front of a text by default."""
    config = _read(folder, _PROMPTS, dict) if (folder / _PROMPTS).is_file() else {}
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ConfigError(f"its {_PROMPTS} has no prompt {str(name)[:60]!r}, which is its default")
    return prompt


def _kind(module: object) -> str:
    kind = module.get("type") if isinstance(module, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"its {MODULES} has a module without a type")
    return kind.rpartition(".")[2]


def _folder_of(module: Mapping[str, Any]) -> str:
    path = module.get("path")
    if not isinstance(path, str) or not path.replace("_", "").isalnum() or not path.isascii():
        raise ConfigError(f"its {MODULES} names the folder {str(path)[:60]!r}; one like 1_Pooling is right")
    return path


def _mode(config: Mapping[str, Any]) -> Mode:
    if isinstance(one := config.get("pooling_mode"), str):
        asked = [one]
    else:
        prefix, full = "pooling_mode_", "mean_sqrt_len_tokens"
        found = [key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on]
        asked = [
            name if name == full else name.removesuffix("_token").removesuffix("_tokens") for name in found
        ]
    modes = [mode for mode in MODES if mode in asked]
    if len(modes) != 1 or len(asked) != 1:
        raise ConfigError(
            f"it pools by {', '.join(asked)[:100] or 'nothing'}; one of {', '.join(MODES)} is right"
        )
    return modes[0]


def _read(folder: Path, name: str, kind: type) -> Any:
    """Returns the JSON of a file in the folder. Raises ConfigError if it is elsewhere, large or no `kind`."""
    file = folder / name
    inside = [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"its files lack {name}, which {MODULES} names") from error
    if not any(target.is_relative_to(place) for place in inside) or not target.is_file():
        raise ConfigError(f"its {name} is no file of its folder")
    if target.stat().st_size > MOST_CONFIG:
        raise ConfigError(f"its {name} has more than {MOST_CONFIG:,} bytes")
    read = parsed(target.read_bytes(), f"its {name}")
    if not isinstance(read, kind):
        raise ConfigError(f"its {name} is no {'list' if kind is list else 'object'}")
    return read
