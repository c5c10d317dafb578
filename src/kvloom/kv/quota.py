"""Token-block quotas (MuxServe, section 3.3): each model's fair share of the pool, moved as need moves.

Quotas say who gives way when blocks run out; while nobody else wants them, a model may hold more. In the code
that was published with MuxServe they bound how many sequences of a model run instead: `initial_caps` and
`move_caps` are these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvloom.types.geometry import Geometry

_BUSY = 0.9  # a model that uses this much of its quota, and has requests waiting, takes more
_KEEP = 0.95  # a donor keeps its use divided by this
_STEP = 0.1  # a taker asks for this part of its quota at a time
_FLOOR = 0.25  # no quota falls below this part of an equal share


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """The use that one model has made of its quota in the last period."""

    used: float
    """Blocks held on average."""
    wanted: int
    """Blocks that the waiting requests would take."""


def initial_quotas(
    total: int, geometries: Mapping[str, Geometry], rates: Mapping[str, float]
) -> dict[str, int]:
    """Returns blocks in proportion to rate × blocks a token; at least one page each. They sum to `total` if
    the floors allow it."""
    weights = {m: rates[m] * g.blocks_per_page / g.tokens_per_block for m, g in geometries.items()}
    even = 1.0 / len(weights)
    whole = sum(weights.values())
    shares = {m: (w / whole if whole else even) for m, w in weights.items()}
    shares = {m: max(share, _FLOOR * even) for m, share in shares.items()}
    scale = total / sum(shares.values())
    return {m: max(geometries[m].blocks_per_page, int(share * scale)) for m, share in shares.items()}


def adapt_quotas(total: int, quotas: Mapping[str, int], usage: Mapping[str, QuotaUsage]) -> dict[str, int]:
    """Moves blocks from models that leave their quota unused to those that press against it. The sum
    stays."""
    floor = int(_FLOOR * total / len(quotas))
    wants: dict[str, int] = {}
    gives: dict[str, int] = {}
    for model, quota in quotas.items():
        use = usage[model]
        if use.wanted and use.used >= _BUSY * quota:
            wants[model] = max(1, min(int(_STEP * total), use.wanted))
        elif not use.wanted:
            gives[model] = max(0, quota - max(int(use.used / _KEEP), floor))
    moved = min(sum(wants.values()), sum(gives.values()))
    out = dict(quotas)
    if moved:
        for model, share in _shares(moved, wants).items():
            out[model] += share
        for model, share in _shares(moved, gives).items():
            out[model] -= share
    return out


def _shares(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Returns `amount` split in proportion to `weights`, in whole numbers, none more than the weight
    itself."""
    whole = sum(weights.values())
    shares = {m: amount * w // whole for m, w in weights.items()}
    left = amount - sum(shares.values())
    for model in sorted(weights, key=lambda m: shares[m] - weights[m]):
        more = min(left, weights[model] - shares[model])
        shares[model] += more
        left -= more
    return shares


SEQUENCE_TOKENS = 416  # of a sequence, for which the published code counts; of its lengths it is told nothing
_FULL = 1.1  # times the sequences that run, which must be there for a model to take more


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """The use that one model has made of its bound on sequences in the last period."""

    ran: float
    """Sequences that ran, on average."""
    asked: int
    """Sequences that wait or run now."""


def sequence_blocks(geometry: Geometry) -> int:
    """Returns the blocks for which a sequence counts: whole pages of `SEQUENCE_TOKENS`."""
    return max(1, SEQUENCE_TOKENS // geometry.tokens_per_block) * geometry.blocks_per_page


def initial_caps(quotas: Mapping[str, int], geometries: Mapping[str, Geometry]) -> dict[str, int]:
    """Returns how many sequences each model may run by its quota of blocks; one at least."""
    return {
        model: max(1, quotas[model] // sequence_blocks(geometry)) for model, geometry in geometries.items()
    }


def move_caps(
    caps: Mapping[str, int], use: Mapping[str, SequenceUse], geometries: Mapping[str, Geometry]
) -> dict[str, int]:
    """Moves bounds as the code that was published with MuxServe does. A model that runs 0.9 of its bound, and
    has a tenth more sequences than it runs, takes a tenth of what it runs from the others, in proportion to
    what they leave below 0.95 of theirs. Blocks that make no whole sequence are lost, so the sum may fall."""
    blocks = {model: sequence_blocks(geometry) for model, geometry in geometries.items()}
    parts = {model: use[model].ran / cap for model, cap in caps.items()}
    idle = {
        model: int(max(1.0, (_KEEP - part) * caps[model])) * blocks[model]
        for model, part in parts.items()
        if part < _BUSY
    }
    whole = sum(idle.values())
    held = {model: cap * blocks[model] for model, cap in caps.items()}
    left = dict(idle)
    for model in sorted(caps.keys() - idle.keys(), key=lambda m: -parts[m]):
        ran, asked = use[model].ran, use[model].asked
        if asked < _FULL * ran:
            continue
        wanted = min(max(1, int(_STEP * ran)), int(asked - ran)) * blocks[model]
        for giver, had in idle.items():
            given = min(wanted * had // whole, left[giver])
            left[giver] -= given
            held[giver] -= given
            held[model] += given
    return {model: max(1, held[model] // blocks[model]) for model in caps}
