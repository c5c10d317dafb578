"""Whatever befalls the nodes of a fleet, it reaches what was specified last, or says what a unit waits for.

`KVLOOM_HISTORIES=20000 pytest tests/cluster/test_node_histories.py` plays more; CI plays some hundreds.
"""

from __future__ import annotations

import os

import pytest

from tests.cluster.node_histories import NodesHistory

HISTORIES = int(os.environ.get("KVLOOM_HISTORIES", "400"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_of_nodes_ends_with_what_fits(part: int) -> None:
    """Meanwhile no component has two processes that may serve, whichever nodes fall silent, die, come back or
    are drained; and at the end nothing is left on a drained node, and no unit waits that has room."""
    for seed in range(part, HISTORIES, PARTS):
        try:
            NodesHistory(seed).run(60)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
