"""A checkpoint becomes a model that kvloom serves, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from kvloom.core.errors import ConfigError, Unavailable
from kvloom.core.geometry import Geometry
from kvloom.core.request import ModelCard
from kvloom.core.spec import ModelSpec
from kvloom.model.attention import NAME, Scoring, attend_dense
from kvloom.model.forward import Forward, Modular
from kvloom.model.parallel.slicing import slice_model
from kvloom.model.parallel.team import Team
from kvloom.model.sampling_defaults import read_sampling_defaults
from kvloom.model.target import CPU, Target

_PROBE_TOKENS = 9


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: nn.Module
    forward: Forward
    dtype: torch.dtype
    geometry: Geometry
    card: ModelCard
    heads: int = 0  # of q, in all layers; 0 where they differ


class _Observer:
    """Stands in for the forward state while the loader looks at what the model asks of attention."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int]] = {}
        self.scorings: dict[int, Scoring] = {}
        self.heads: set[int] = set()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        if k.shape[-1] != v.shape[-1]:
            raise ConfigError(
                f"its keys have {k.shape[-1]} numbers and its values {v.shape[-1]} (latent attention), "
                "and kvloom's blocks hold both at one head size"
            )
        self.layers[layer] = (k.shape[1], k.shape[2])
        self.scorings[layer] = scoring
        self.heads.add(q.shape[1])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, 0, scoring).transpose(0, 1)


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
    target.place(module)
    observer = _prove(module, team, target)
    target.settle(module)
    heads, head_dim = next(iter(observer.layers.values()))
    geometry = Geometry(len(observer.layers), heads, head_dim, dtype.itemsize, block_bytes)
    straight = target.straighten(module, observer.scorings, geometry)
    if team is not None and not team.group.agree(straight is not None):
        straight = None  # all ranks must exchange the same
    card = _card(spec, module, parameters)
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


def _prove(module: Any, team: Team | None, target: Target) -> _Observer:
    """See what the stock model asks of our attention, slice and fuse it, and compare logits on a short
    prompt. Of a team the first rank alone does what takes the whole model."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (1, _PROBE_TOKENS), generator=generator).to(module.device)
    observer, expected = _Observer(), None
    positions = torch.arange(_PROBE_TOKENS, device=module.device)[None]
    probe = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.inference_mode():
        if team is None or team.group.rank == 0:
            expected = module(input_ids=ids, use_cache=False).logits
        module.set_attn_implementation(NAME)
        if expected is not None:
            module(**probe, kv=observer)
            _uniform(module, observer)
        if team is not None:
            observer = _slice(module, probe, observer, team)
        target.fuse(module)
        found = module(**probe, kv=observer).logits
    if expected is not None:
        _compare(found, expected)
    return observer


def _slice(module: Any, probe: dict[str, Any], whole: _Observer, team: Team) -> _Observer:
    """Cut the module down to this rank's slice. Returns what the slice asks of attention."""
    for heads, _ in whole.layers.values():
        if heads % team.group.size:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"{team.group.size} ranks cannot share its {heads} KV heads evenly; "
                f"a `tensor_parallel` of {fits} is right"
            )
    team.meet()
    slice_model(module, team.group)
    observer = _Observer()
    module(**probe, kv=observer)
    _uniform(module, observer)
    return observer


def _compare(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    bound = 1e-4 if expected.dtype == torch.float32 else 5e-2
    if not error < bound:
        raise ConfigError(f"its logits under kvloom's attention differ from transformers' own by {error:.1e}")


def _uniform(module: Any, observer: _Observer) -> None:
    layers = getattr(module.config, "num_hidden_layers", len(observer.layers))
    if not observer.layers:
        raise ConfigError("it does not use transformers' attention interface")
    if sorted(observer.layers) != list(range(layers)):
        raise ConfigError(
            f"only {len(observer.layers)} of its {layers} layers are attention; others keep a state of their "
            "own, which kvloom's pool does not hold"
        )
    if len(set(observer.layers.values())) != 1:
        raise ConfigError(
            f"its layers differ in KV heads or head size: {sorted(set(observer.layers.values()))}"
        )
    kinds = getattr(module.config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and not observer.scorings[layer].window:
            raise ConfigError(
                f"its layer {layer} has a sliding window that the attention interface is not told"
            )


def _card(spec: ModelSpec, module: Any, parameters: int) -> ModelCard:
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
