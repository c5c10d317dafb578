"""Whatever befalls a fleet and its controller, the fleet reaches what was specified last.

`KVLOOM_HISTORIES=20000 pytest tests/cluster/test_histories.py` plays as many as were played when it
was written; CI plays some hundreds.
"""

from __future__ import annotations

import os

import pytest

from tests.cluster.histories import History

HISTORIES = int(os.environ.get("KVLOOM_HISTORIES", "400"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_ends_with_the_fleet_that_is_specified(part: int) -> None:
    """Meanwhile no unit has two processes, none is drained twice, and a rolling restart keeps its budget."""
    for seed in range(part, HISTORIES, PARTS):
        try:
            History(seed).run(40)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
