"""What a process reports is read whole, however much an admin has said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from kvloom.api.admin_units import MAX_BODY
from kvloom.core.spec import ModelSpec
from kvloom.serve.component import Component
from kvloom.serve.orders import Report, Run
from tests.processes import DEADLINE
from tests.router.roster import spec

REPORTER = """\
import os, sys
from pathlib import Path
os.write(int(sys.argv[1]), Path(sys.argv[2]).read_bytes())
"""


def test_a_unit_described_at_the_greatest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out of the description is in the report: it is several times as long."""
    tmp_path.joinpath("reporter.py").write_text(REPORTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    short = b'{"name":"","path":""}'
    models = msgspec.json.decode(
        b"[" + b",".join([short] * (MAX_BODY // len(short))) + b"]", type=tuple[ModelSpec, ...]
    )
    asked = Run(msgspec.structs.replace(spec("u"), models=models))
    report = tmp_path / "report"
    report.write_bytes(msgspec.json.encode(asked) + b"\n")

    async def test() -> list[Report]:
        async with asyncio.timeout(DEADLINE):
            component = await Component.start(str(report), "reporter")
            found = [one async for one in component.reports()]
            await component.ended()
            return found

    assert report.stat().st_size > 3 * MAX_BODY
    assert asyncio.run(test()) == [asked]
