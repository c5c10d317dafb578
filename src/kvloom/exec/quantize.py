"""Makes a checkpoint of 8 or 4 bits from another, in the compressed-tensors format, which other engines read.

The linear modules of the decoder's layers become integers with a scale for each group of neighbours in a row;
all else is copied as it is. A layer `X.weight` becomes `X.weight_packed`, int32 [N, K · bits / 32], whose
bits from the lowest up are the codes plus 2^(bits - 1); `X.weight_scale` [N, G] in the number format that the
weight had; and `X.weight_shape`, int64 [2]. That is what the format's own package names `pack-quantized`:
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvloom.exec.checkpoint import CONFIG, INDEX, SMALL, TEMPLATES, Checkpoint, open_checkpoint
from kvloom.exec.experts import split_experts
from kvloom.exec.formats.weights import module_name
from kvloom.exec.huggingface import AutoConfig, outline
from kvloom.exec.mapped import MappedFiles
from kvloom.exec.quantized import Bits, from_halves
from kvloom.types.errors import ConfigError

GROUP_SIZES: Final = (32, 16)
"""The lengths of groups, of which the first is taken that divides the inputs of all layers."""
_WEIGHT: Final = ".weight"
_TRIED: Final = 9  # scales of a group of 4 bits
_CHUNK: Final = 1 << 22  # numbers that are rounded at a time

Progress = Callable[[str], None]


def quantize_checkpoint(path: str, revision: str | None, out: Path, bits: Bits, progress: Progress) -> None:
    """Writes the checkpoint that `path` names, quantised, into the new folder `out`. One file's tensors are
    in memory at a time. Raises ConfigError if it cannot be quantised, or `out` is there already; then nothing
    is left of it."""
    if out.exists():
        raise ConfigError(f"{out} is there already; a new folder is right")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: no such folder; a path that can be written is right")
    checkpoint = open_checkpoint(path, revision)
    config = json.loads((checkpoint.folder / CONFIG).read_bytes())
    if "quantization_config" in config:
        raise ConfigError("it is quantised already; a checkpoint of whole weights is right")
    widths, left = _linears(checkpoint)
    group = _group(widths)
    left += [name for name, width in widths.items() if width % group]
    chosen = {name for name, width in widths.items() if width % group == 0}
    with _whole_folder(out) as folder:
        found = _write_weights(checkpoint, folder, chosen, bits, group, progress)
        if missing := sorted(chosen - found):
            raise ConfigError(
                f"its files lack {missing[0]}{_WEIGHT}; a tensor for each linear layer is right"
            )
        _copy_rest(checkpoint.folder, folder)
        config["quantization_config"] = _description(bits, group, sorted(left))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def rounded(weight: Tensor, bits: Bits, group: int) -> tuple[Tensor, Tensor]:
    """Returns integers [N, K], int8, and scales [N, K / group] in the number format of `weight`; a number is
    scale · code. A group's largest magnitude has the code ±127 with 8 bits. With 4 bits, of several scales
    the one is taken whose codes from -8 to 7 have the least squared error."""
    groups = weight.float().view(len(weight), -1, group)
    top, least = groups.abs().amax(-1), torch.finfo(weight.dtype).tiny
    if bits == 8:
        scales = (top / 127).clamp_min(least).to(weight.dtype)
        return _codes(groups, scales, 127).flatten(1), scales
    best: Tensor | None = None
    for i in range(_TRIED):
        tried = (top / (7 + 2 * i / (_TRIED - 1))).clamp_min(least).to(weight.dtype)
        numbers = _codes(groups, tried, 7)
        error = (numbers * tried.float()[..., None] - groups).square_().sum(-1)
        if best is None:
            best, scales, codes = error, tried, numbers
            continue
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, tried, scales)
        codes = torch.where(better[..., None], numbers, codes)
    return codes.flatten(1), scales


def _codes(groups: Tensor, scales: Tensor, most: int) -> Tensor:
    """Returns the codes nearest to numbers [N, G, group], up to `most`."""
    least = -most if most == 127 else -most - 1
    return (groups / scales.float()[..., None]).round_().clamp_(least, most).to(torch.int8)


def packed(codes: Tensor, bits: Bits) -> Tensor:
    """Returns int32 [N, K · bits / 32] of codes [N, K], whose K is a multiple of 8."""
    unsigned = from_halves((codes + 8).view(torch.uint8)) if bits == 4 else codes.view(torch.uint8) ^ 128
    return unsigned.contiguous().view(torch.int32)


def _linears(checkpoint: Checkpoint) -> tuple[dict[str, int], list[str]]:
    """Returns the inputs of the linear modules in the decoder's layers, by their names in its files, and the
    names of the others, routers of experts among them."""
    config = AutoConfig.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
    module = outline(config, torch.float32)
    tensors = MappedFiles(checkpoint.weights).tensors()
    matrices = {one.name.removesuffix(_WEIGHT) for one in tensors if len(one.get_shape()) == 2}
    stored = {module_name(name): name for name in matrices}
    split_experts(module, stored)
    stacked = [name for name, one in module.named_parameters() if one.dim() == 3]
    if stacked:
        raise ConfigError(
            f"{stacked[0]} holds several experts; files with tensors of each expert's gate_proj, up_proj and "
            "down_proj are right"
        )
    linears = {stored.get(name, name): one for name, one in module.named_modules() if type(one) is nn.Linear}
    widths = {name: one.in_features for name, one in linears.items() if _in_layer(name)}
    if not widths:
        raise ConfigError("its layers have no linear modules; a decoder that has some is right")
    routers = [name for name in sorted(matrices - widths.keys()) if _in_layer(name)]
    return widths, [name for name in linears if name not in widths] + routers


def _in_layer(name: str) -> bool:
    return any(map(str.isdigit, name.split(".")))


def _group(widths: dict[str, int]) -> int:
    """Returns the longest group that divides the inputs of all layers; if none does, the shortest."""
    return next(
        (one for one in GROUP_SIZES if not any(width % one for width in widths.values())), GROUP_SIZES[-1]
    )


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Yields a folder that gets the name `out` if the block ends well, and else is removed."""
    made = out.with_name(f"{out.name}.partial")
    try:
        made.mkdir()
    except FileExistsError:
        raise ConfigError(f"{made} is there already, of a run that is under way or was killed") from None
    try:
        yield made
        made.rename(out)
    except BaseException:
        shutil.rmtree(made)
        raise


def _write_weights(
    checkpoint: Checkpoint, folder: Path, chosen: set[str], bits: Bits, group: int, progress: Progress
) -> set[str]:
    """Writes a file for each of the checkpoint's, and their index if there are several. Returns the names of
    the layers that were quantised."""
    found, places, size = set[str](), dict[str, str](), 0
    for file in checkpoint.weights:
        made = dict[str, Tensor]()
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- it is no mapping
                layer, weight = name.removesuffix(_WEIGHT), tensors.get_tensor(name)
                if not name.endswith(_WEIGHT) or layer not in chosen:
                    made[name] = weight
                    continue
                _check(weight, name, file)
                made |= _layer(layer, weight, bits, group)
                found.add(layer)
                progress(f"{len(found)} of {len(chosen)} layers: {layer}")
        save_file(made, folder / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(made, file.name)
        size += sum(one.nbytes for one in made.values())
    if len(checkpoint.weights) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return found


def _check(weight: Tensor, name: str, file: Path) -> None:
    """Raises ConfigError if a weight cannot be quantised."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.itemsize < 2:
        raise ConfigError(
            f"{name} in {file.name} is {weight.dtype} of shape {list(weight.shape)}; a matrix of 16 or 32 "
            "bits is right"
        )
    if not bool(weight.isfinite().all()):
        raise ConfigError(
            f"{name} in {file.name} has a number that is infinite or none; finite ones are right"
        )


def _layer(name: str, weight: Tensor, bits: Bits, group: int) -> dict[str, Tensor]:
    """Returns the tensors that stand for a quantised layer in the file."""
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [rounded(some, bits, group) for some in torch.split(weight, rows)]
    return {
        f"{name}.weight_packed": torch.cat([packed(codes, bits) for codes, _ in parts]),
        f"{name}.weight_scale": torch.cat([scales for _, scales in parts]),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def _copy_rest(source: Path, folder: Path) -> None:
    """Copies tokenizer, templates and all other small files that are no weights."""
    for place in (source, source / TEMPLATES):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            wanted = any(file.match(pattern) for pattern in SMALL) and not file.name.endswith(".index.json")
            if file.is_file() and wanted:
                to = folder / file.relative_to(source)
                to.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, to)


def _description(bits: Bits, group: int, left: list[str]) -> dict[str, Any]:
    """Returns the config's `quantization_config`."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": left,
    }
