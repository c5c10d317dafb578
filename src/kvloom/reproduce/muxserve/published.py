"""The paper's numbers, out of published.json beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

Numbers = tuple[float, ...]


class Figure3(Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds by share of the multiprocessors: LLaMA-7B, 128 tokens a sequence."""

    shares: Numbers
    rows: dict[str, Numbers]


class Figure5(Struct, frozen=True, forbid_unknown_fields=True):
    """By α, then by rate scale, then by system: the sum of whole rates times throughputs over 19, as it is
    plotted; None where the published logs are incomplete. attained: percent, by α, system and SLO scale, at
    rate scale 1."""

    systems: tuple[str, ...]
    scales: Numbers
    throughput: dict[str, tuple[tuple[float | None, ...], ...]]
    slo_scales: tuple[int, ...]
    attained: dict[str, tuple[Numbers, ...]]


class Figure7(Struct, frozen=True, forbid_unknown_fields=True):
    """Throughput weighted with rates, by average rate and system. rates: of each model, at 7.1."""

    systems: tuple[str, ...]
    averages: Numbers
    throughput: tuple[Numbers, ...]
    rates: Numbers


class Figure8(Struct, frozen=True, forbid_unknown_fields=True):
    """Times as much throughput."""

    gain: float


class Figure9(Struct, frozen=True, forbid_unknown_fields=True):
    """Times as much throughput by each step, and as many requests in time by the second one."""

    separation: float
    unified: float
    attained: float


class Setting10(Struct, frozen=True, forbid_unknown_fields=True):
    """By policy. blocks: percent of those in use, by model."""

    weighted: Numbers
    blocks: tuple[Numbers, ...] = ()


class Figure10(Struct, frozen=True, forbid_unknown_fields=True):
    policies: tuple[str, ...]
    a: Setting10
    b: Setting10


class Published(Struct, frozen=True, forbid_unknown_fields=True):
    """source: where the numbers are from."""

    source: str
    figure_3: Figure3
    figure_5: Figure5
    figure_7: Figure7
    figure_8: Figure8
    figure_9: Figure9
    figure_10: Figure10


PUBLISHED: Final = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=Published)
