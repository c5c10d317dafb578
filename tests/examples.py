"""How many random examples a test plays: few in every run, as many as one likes by
`KVLOOM_EXAMPLES=100 make test ARGS=tests/engine/test_scenarios.py`, which plays a hundred times as many."""

from __future__ import annotations

import os

_TIMES = float(os.environ.get("KVLOOM_EXAMPLES", "1"))


def examples(count: int) -> int:
    return max(1, round(count * _TIMES))
