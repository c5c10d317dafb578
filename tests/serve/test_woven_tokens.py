"""A few of what `python -m tests.serve.woven` serves many of: recalls, deaths, another share."""

from __future__ import annotations

from pathlib import Path

from tests.serve.woven import run


def test_the_tokens_are_the_oracle_s_whatever_happens(tmp_path: Path) -> None:
    [tally] = run(20, ("qwen2",), tmp_path).values()
    print(f"{tally.ties} ties")
    assert tally.requests == 20
    assert min(tally.shares, tally.recalls, tally.kills, tally.preempted) > 0
    assert 0 < tally.away < tally.tokens
    assert tally.cold > 0
