"""A checkpoint becomes a model that kvloom serves, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvloom.core.errors import ConfigError, Unavailable
from kvloom.core.geometry import Geometry
from kvloom.core.request import ModelCard
from kvloom.core.spec import ModelSpec
from kvloom.model.card import card_of
from kvloom.model.forward import Forward, Modular
from kvloom.model.parallel.team import Team
from kvloom.model.proof import prove
from kvloom.model.target import CPU, Target


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: nn.Module
    forward: Forward
    dtype: torch.dtype
    geometry: Geometry
    card: ModelCard
    heads: int = 0  # of q, in all layers; 0 where they differ


def load_models(
    models: Sequence[ModelSpec],
    block_bytes: int,
    progress: Callable[[str], None] = lambda _: None,
    team: Team | None = None,
    target: Target = CPU,
) -> dict[str, LoadedModel]:
    """By name; see `load_model`."""
    loaded: dict[str, LoadedModel] = {}
    for i, spec in enumerate(models):
        progress(f"loading model {spec.name} ({i + 1}/{len(models)})")
        loaded[spec.name] = load_model(spec, block_bytes, team, target)
    return loaded


def load_model(
    spec: ModelSpec, block_bytes: int, team: Team | None = None, target: Target = CPU
) -> LoadedModel:
    """Build, fuse and prove a checkpoint. team: the ranks that share it, each of which loads its own slice at
    the same time; target: where it is to run. Raises ConfigError naming the model and what is wrong with it,
    Unavailable where a rank of the team is gone."""
    try:
        return _load(spec, block_bytes, team, target)
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}: {error.message}") from error
    except Unavailable:
        raise
    except Exception as error:  # whatever transformers, huggingface_hub or safetensors make of its files
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"models.{spec.name}: {spec.path} cannot be loaded: {reason}") from error


def _load(spec: ModelSpec, block_bytes: int, team: Team | None, target: Target) -> LoadedModel:
    _no_code(spec.path)
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("it is an encoder-decoder; kvloom serves decoders")
    dtype = target.dtype(config) if spec.dtype == "auto" else getattr(torch, spec.dtype)
    module, info = AutoModelForCausalLM.from_pretrained(
        spec.path,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # reported, and refused below with both shapes
        output_loading_info=True,
    )
    _whole(info)
    module.eval().requires_grad_(False)
    parameters = sum(p.numel() for p in module.parameters())
    observer = prove(module, team, target)
    target.settle(module)
    heads, head_dim = next(iter(observer.layers.values()))
    geometry = Geometry(len(observer.layers), heads, head_dim, dtype.itemsize, block_bytes)
    straight = target.straighten(module, observer.scorings, geometry)
    if team is not None and not team.group.agree(straight is not None):
        straight = None  # all ranks must exchange the same
    card = card_of(spec, module, parameters)
    q_heads = next(iter(observer.heads)) if len(observer.heads) == 1 else 0
    return LoadedModel(module, straight or Modular(module), dtype, geometry, card, q_heads)


def _no_code(path: str) -> None:
    """Refuse a checkpoint that brings its own model: transformers would ask at the terminal, or go on with
    a class of its own that may be another model."""
    config, _ = PretrainedConfig.get_config_dict(path)
    wanted = {"AutoConfig", "AutoModelForCausalLM"} & set(config.get("auto_map") or ())
    if wanted and config.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError("it needs code of its own (auto_map in its config), and kvloom runs none")


def _whole(info: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves a weight to chance."""
    if info["missing_keys"]:
        raise ConfigError(f"its files lack {_some(info['missing_keys'])}")
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(f"{name} has shape {list(found)} in its files and {list(wanted)} in its config")


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first
