"""Freeness: for how many decode steps a unit's batch finds room (Llumnix, section 4.4).

F = (M − ΣV) / B. In the paper all are tokens: M the instance's memory, ΣV the virtual usage, B the batch's
size, which is also the tokens that a step makes. On a unit M and ΣV are blocks of the pool that its models
share, and B is the blocks that a step of each of them takes: running sequences times a token's blocks, summed
over models. A count of sequences would not do: one of a large model fills the pool many times as fast as one
of a small model. So F is decode steps, whatever the unit serves, and units can be compared. With one model F
is the paper's; its artifact counts blocks of 16 tokens a request, which are F / 16.

Below zero F is what is missing, M − ΣV, over a token's blocks of the unit's largest model: tokens of that
one. The paper divides by B as well, so of two units that miss the same the larger batch would look freer, and
draw what comes. In blocks alone units whose models have unlike K and V could not be compared.
"""

from __future__ import annotations

import math

from kvloom.core.load import UnitLoad
from kvloom.fleet.usage import virtual_usage


def batch(load: UnitLoad) -> float:
    """Blocks that a decode step takes on average. Where nothing runs yet, those that wait first are the
    batch."""
    models = load.models.values()
    step = sum(model.running * model.token_blocks for model in models)
    return step or sum(model.token_blocks for model in models if model.waiting)


def freeness(load: UnitLoad) -> float:
    """Decode steps. Where more is wanted than there is, the tokens of the largest model that are missing, as
    a negative number; −∞ where the unit drains; ∞ where it is idle."""
    if load.draining:
        return -math.inf
    left, step = load.total_blocks - virtual_usage(load), batch(load)
    if left <= 0:  # also where nothing runs, and all is promised
        return left / max((model.token_blocks for model in load.models.values()), default=1.0)
    return left / step if step else math.inf
