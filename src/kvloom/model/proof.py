"""Whether a model under kvloom's attention, sliced and fused, is the model that transformers has."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.errors import ConfigError
from kvloom.model.attention import NAME, Scoring, attend_dense
from kvloom.model.parallel.slicing import slice_model
from kvloom.model.parallel.team import Team
from kvloom.model.target import Target

_PROBE_TOKENS: Final = 9


class Observer:
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


def prove(module: Any, team: Team | None, target: Target) -> Observer:
    """See what the stock model asks of our attention, bring it to where it is to run, slice and fuse it, and
    compare logits on a short prompt. Of a team the first rank alone does what takes the whole model, and does
    it where the files are mapped: no rank's device need hold the whole. Raises ConfigError."""
    if team is None:
        target.place(module)
    observer, expected = Observer(), None
    with torch.inference_mode():
        if team is None or team.group.rank == 0:
            probe = _probe(module)
            expected = module(input_ids=probe["input_ids"], use_cache=False).logits
        module.set_attn_implementation(NAME)
        if expected is not None:
            module(**probe, kv=observer)
            _uniform(module, observer)
        if team is not None:
            observer = _slice(module, observer, team, target)
        target.fuse(module)
        found = module(**_probe(module), kv=observer).logits
    if expected is not None:
        _compare(found, expected.to(found.device))
    return observer


def _probe(module: Any) -> dict[str, Any]:
    """A short prompt, where the module is."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (1, _PROBE_TOKENS), generator=generator)
    positions = torch.arange(_PROBE_TOKENS)[None]
    return {
        "input_ids": ids.to(module.device),
        "position_ids": positions.to(module.device),
        "use_cache": False,
    }


def _slice(module: Any, whole: Observer, team: Team, target: Target) -> Observer:
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
    with torch.inference_mode(False):  # as in `slice_model`
        target.place(module)
    observer = Observer()
    module(**_probe(module), kv=observer)
    _uniform(module, observer)
    return observer


def _compare(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    bound = 1e-4 if expected.dtype == torch.float32 else 5e-2
    if not error < bound:
        raise ConfigError(f"its logits under kvloom's attention differ from transformers' own by {error:.1e}")


def _uniform(module: Any, observer: Observer) -> None:
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
