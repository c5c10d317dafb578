"""What units that lend tell of waits, for whoever scrapes."""

from __future__ import annotations

from kvloom.api.metrics import Metrics
from kvloom.types.clock import WallClock
from kvloom.types.load import UnitLoad, Waits


def unit(waits: Waits | None) -> UnitLoad:
    return UnitLoad(
        total_blocks=8, free_blocks=8, block_bytes=512, policy="adbs", models={}, lent_blocks=2, waits=waits
    )


def test_waits_are_told_by_the_model_and_as_measured() -> None:
    waits = Waits(
        tasks_total=5,
        ahead=0.125,
        parts=61,
        service=0.25,
        wait=1.0,
        beyond=2.0,
        stall=3.0,
        expected_wait=4.0,
        expected_beyond=5.0,
        expected_stall=6.0,
    )
    loads = {"a": unit(waits), "b": unit(None)}
    text = Metrics(WallClock()).render(loads, {"a": "up", "b": "up"}, {}).decode()
    told = [line for line in text.splitlines() if line.startswith("kvloom_weave_wait_seconds{")]
    assert told == [
        f'kvloom_weave_wait_seconds{{source="{source}",unit="a",wait="{name}"}} {value}'
        for name, values in {"wait": (1.0, 4.0), "beyond": (2.0, 5.0), "stall": (3.0, 6.0)}.items()
        for source, value in zip(("measured", "expected"), values, strict=True)
    ]
