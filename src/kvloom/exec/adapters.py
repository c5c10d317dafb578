"""LoRA adapters as PEFT saves them, which a stranger may have made: `adapter_config.json` and
`adapter_model.safetensors`. What they ask for beyond plain low-rank products of a model's linear layers is
refused, and so is what does not fit the model that they are for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from kvloom.exec.checkpoint import ADAPTER, check_files, count_elements, parsed
from kvloom.types.errors import ConfigError

WEIGHTS: Final = "adapter_model.safetensors"
PICKLED: Final = "adapter_model.bin"
LEAST_RANK, MOST_RANK = 4, 256
MOST_SCALE: Final = 1e4

LayerName = tuple[int, str]
"""A layer's number and the name of a linear layer in it, as `q_proj`."""

_FORMATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_KEY: Final = re.compile(r"base_model\.model\.([\w.]{1,200})\.lora_(A|B)\.weight", re.ASCII)
_PLACE: Final = re.compile(r"(?:\w+\.)*layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)", re.ASCII)
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "weights of DoRA",
    "rank_pattern": "ranks of their own for some layers",
    "alpha_pattern": "scales of their own for some layers",
    "modules_to_save": "whole modules (modules_to_save)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases (lora_bias)",
    "use_qalora": "weights of QALoRA",
    "trainable_token_indices": "embeddings (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layer's (target_parameters)",
    "layer_replication": "layers that stand there twice (layer_replication)",
    "alora_invocation_tokens": "an activation by tokens (aLoRA)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter, checked. A layer for which it has weights computes x · Wᵀ + scale · (x · Aᵀ) · Bᵀ."""

    rank: int
    scale: float
    weights: Mapping[LayerName, tuple[Tensor, Tensor]]
    """A [rank, inputs] and B [outputs, rank], all in one number format."""

    @property
    def digest(self) -> str:
        """Returns a digest of all that it computes with."""
        found = blake2b(repr((self.rank, self.scale)).encode(), digest_size=16)
        for place in sorted(self.weights):
            for side in self.weights[place]:
                found.update(repr((place, side.dtype, tuple(side.shape))).encode())
                found.update(side.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()


def read_adapter(path: str, shapes: Mapping[LayerName, tuple[int, int]]) -> Adapter:
    """Returns the adapter in the folder `path`. shapes: outputs and inputs of the linear layers that it may
    change. Raises ConfigError."""
    folder = Path(path)
    config = folder / ADAPTER
    if not config.is_file():
        raise ConfigError(
            f"{folder} has no {ADAPTER}; the folder of a LoRA adapter, as PEFT saves it, is right"
        )
    check_files(folder)
    rank, scale = _settings(parsed(config.read_bytes(), f"its {ADAPTER}"))
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = f", and {PICKLED} is a pickle, which is not read" if (folder / PICKLED).exists() else ""
        raise ConfigError(f"its files lack {WEIGHTS}{pickled}; weights are read from safetensors only")
    count_elements((file,))
    return Adapter(rank, scale, _weights(file, rank, shapes))


def _settings(config: Any) -> tuple[int, float]:
    """Returns the rank and the scale that the config says. Raises ConfigError for what is not served."""
    if not isinstance(config, dict):
        raise ConfigError(f"its {ADAPTER} is no object")
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"its {ADAPTER}: peft_type: {_shown(config.get('peft_type'))}; LORA is right")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ConfigError(
                f"its {ADAPTER}: {key}: it has {what}, which are not served; plain LoRA is right"
            )
    if config.get("bias", "none") != "none":
        raise ConfigError(f"its {ADAPTER}: bias: {_shown(config['bias'])}; none is right")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not LEAST_RANK <= rank <= MOST_RANK:
        raise ConfigError(
            f"its {ADAPTER}: r: {_shown(rank)}; a rank from {LEAST_RANK} to {MOST_RANK} is right"
        )
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) <= MOST_SCALE:
        raise ConfigError(
            f"its {ADAPTER}: lora_alpha: {_shown(alpha)}; a number of {MOST_SCALE:g} at most is right"
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _shown(value: object) -> str:
    return repr(value)[:60]


def _weights(
    file: Path, rank: int, shapes: Mapping[LayerName, tuple[int, int]]
) -> dict[LayerName, tuple[Tensor, Tensor]]:
    halves: dict[LayerName, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 -- it is no mapping
            place, side = _place(key, shapes)
            tensor = tensors.get_tensor(key)
            _check(key, tensor, rank, shapes[place], side)
            if side in halves.setdefault(place, {}):
                raise ConfigError(f"its {WEIGHTS}: {key[:200]} stands there twice under another name")
            halves[place][side] = tensor
    if not halves:
        raise ConfigError(f"its {WEIGHTS} holds no weights; lora_A and lora_B of linear layers are right")
    for (layer, name), both in halves.items():
        if len(both) < 2:
            raise ConfigError(
                f"its {WEIGHTS} has one of lora_A and lora_B of {name} in layer {layer}; both are right"
            )
    formats = {tensor.dtype for both in halves.values() for tensor in both.values()}
    common = formats.pop() if len(formats) == 1 else torch.float32
    return {place: (both["A"].to(common), both["B"].to(common)) for place, both in halves.items()}


def _place(key: str, shapes: Mapping[LayerName, tuple[int, int]]) -> tuple[LayerName, str]:
    """Returns the layer to which a tensor belongs, and whether it is A or B."""
    where, known = f"its {WEIGHTS}: {key[:200]}", sorted({name for _, name in shapes})
    found = _KEY.fullmatch(key)
    if found is None:
        raise ConfigError(f"{where} is no weight of plain LoRA; lora_A and lora_B of linear layers are right")
    place = _PLACE.fullmatch(found[1])
    if place is None or (name := place[2]) not in known:
        raise ConfigError(
            f"{where}: the base has no such layer that adapts; {', '.join(known)} of its layers are right"
        )
    layers = 1 + max(layer for layer, _ in shapes)
    if (at := (int(place[1]), name)) not in shapes:
        raise ConfigError(f"{where}: the base has {layers} layers; an adapter of this base is right")
    return at, found[2]


def _check(key: str, tensor: Tensor, rank: int, shape: tuple[int, int], side: str) -> None:
    where, (outputs, inputs) = f"its {WEIGHTS}: {key[:200]}", shape
    right = (rank, inputs) if side == "A" else (outputs, rank)
    if tensor.dtype not in _FORMATS:
        raise ConfigError(f"{where} is of {tensor.dtype}; float32, bfloat16 or float16 is right")
    if tuple(tensor.shape) != right:
        own = tensor.shape[0 if side == "A" else -1] if tensor.dim() == 2 else None
        if own is not None and own != rank:
            raise ConfigError(f"{where} has the rank {own}, and {ADAPTER} says {rank}; the same is right")
        raise ConfigError(f"{where} has the shape {list(tensor.shape)}; {list(right)} is right for this base")
    if not bool(tensor.isfinite().all()):
        raise ConfigError(f"{where} has numbers that are NaN or infinite; finite ones are right")
