"""Virtual usage: the memory that a unit's requests count for, whatever they hold (Llumnix, algorithm 1).

The paper gives each request of an instance, which serves one model, a virtual usage V: what it holds, and its
part of its priority's headroom, if it runs; what it needs, if it is the first that waits; nothing, if it
waits behind another; and infinity, if it is the request that is made up to empty a draining instance. Only
the sum is ever used, and a unit reports sums. With several models over one pool, in blocks of the pool:

- What is held is each block once, however many sequences share it; pins and reservations count, because no
  request can have what they keep. So do blocks lent to another unit, as long as they are.
- A prompt that is being computed takes its blocks piece by piece, while the paper's engine takes all at once.
  So what it has yet to take counts as held.
- Each model has a queue of its own, and what is ahead in one does not hold the others up. So the first that
  waits of each model counts, and no other.
- A priority's headroom is divided among all of its running requests on the unit. Each one's part is tokens of
  its own model, whose K and V have their own size.

With one model all of that is the paper's, times the blocks of a page.
"""

from __future__ import annotations

import math
from collections import Counter

from kvloom.core.load import UnitLoad


def held(load: UnitLoad) -> int:
    """Blocks that what runs here has taken, and has yet to take for its prompts, and those that are lent."""
    return load.lent_blocks + sum(model.used_blocks + model.begun_blocks for model in load.models.values())


def demanded(load: UnitLoad) -> int:
    """Blocks that the first which waits of each model needs."""
    return sum(model.head_blocks for model in load.models.values())


def wanted(load: UnitLoad) -> int:
    """Blocks that are held, and those that all which waits needs: memory load, as INFaaS++ has it (Llumnix,
    section 6.1)."""
    return held(load) + sum(model.waiting_blocks for model in load.models.values())


def headroom(load: UnitLoad) -> float:
    """Blocks that stay free for priorities."""
    running: Counter[int] = Counter()
    for model in load.models.values():
        for level in model.levels:
            running[level.priority] += level.running
    return sum(
        level.headroom * model.token_blocks * level.running / running[level.priority]
        for model in load.models.values()
        for level in model.levels
        if level.running
    )


def virtual_usage(load: UnitLoad) -> float:
    """Blocks; more than the pool has where too much waits or is kept free, infinite where the unit drains."""
    return math.inf if load.draining else held(load) + demanded(load) + headroom(load)
