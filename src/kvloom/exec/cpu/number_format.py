"""Chooses the number format in which a CPU holds a model's weights: float32, or 16 bits that are widened as
they are read. Formats of quantised checkpoints are read in `exec/formats/`."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import Any, Final

import torch
from torch import nn

from kvloom.exec.cpu.linear import HalfLinear, PackedLinear
from kvloom.exec.widened import can_widen
from kvloom.kernels.cpu.half import HalfPanels, narrow_formats

_NAMES: Final = {torch.bfloat16: "BF16", torch.float16: "F16"}
_MEASURED: Final = 64 << 20  # bytes in float32 of what is measured: more than most caches hold
_ROWS: Final = 4
_TURNS: Final = 16


def own_format(config: Any, matrices: Callable[[], Set[str]]) -> torch.dtype:
    """Returns the format of 16 bits that the config tells, if all plain matrices are saved in it and it is
    widened here, else float32: nothing is rounded unasked. matrices: tells safetensors' names of their
    formats."""
    own = getattr(torch, str(getattr(config, "dtype", None)).removeprefix("torch."), None)
    return own if own in narrow_formats() and matrices() == {_NAMES[own]} else torch.float32


def choose_format(own: torch.dtype, outline: nn.Module, say: Callable[[str], None]) -> torch.dtype:
    """Returns the format in which decoding is quicker here: `own` of the checkpoint, or float32, which it is
    if the model cannot compute in another format than its weights', and if it is so small that caches hold it
    anyway. Says which, and why. outline: the model in its own format, without weights."""
    linears = _linears(outline)
    size = 4 * sum(weight.numel() for weight in outline.parameters())
    if own == torch.float32 or not linears or size < _MEASURED or not can_widen(outline):
        return torch.float32
    halves, wholes = measure(own, max(linears, key=lambda one: one.weight.numel()).in_features)
    chosen = own if halves <= wholes else torch.float32
    name = str(own).removeprefix("torch.")
    say(
        f"weights in {str(chosen).removeprefix('torch.')}: reading {_MEASURED >> 20} MiB of float32 takes "
        f"{1e3 * wholes:.1f} ms here, the same numbers in {name} {1e3 * halves:.1f} ms"
    )
    return chosen


def _linears(outline: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers that are not quantised."""
    found = (one for one in outline.modules() if isinstance(one, nn.Linear))
    return [one for one in found if getattr(one, "weight", None) is not None]


def measure(own: torch.dtype, depth: int) -> tuple[float, float]:
    """Returns the seconds that a product of a few rows takes with a weight of `depth` inputs in the format
    `own`, and in float32: the least of several turns, in which the two alternate."""
    weight = torch.ones(_MEASURED // (4 * depth), depth)
    panels = HalfPanels(weight.to(own))
    panels.round_inputs()
    sides = HalfLinear(panels, None), PackedLinear(weight, None)
    x, best = torch.ones(_ROWS, depth), [float("inf")] * len(sides)
    with torch.inference_mode():
        for _ in range(_TURNS):
            for i, side in enumerate(sides):
                begun = time.perf_counter()
                side(x)
                best[i] = min(best[i], time.perf_counter() - begun)
    return best[0], best[1]
