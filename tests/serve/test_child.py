"""What a process reports is read whole, however much an admin has said."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloom.api.admin_routes import MAX_CONFIG
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.serve.processes import child
from kvloom.serve.processes.child import LONGEST_REPORT, ChildProcess
from kvloom.serve.processes.messages import ChildReport, StartProgress
from kvloom.types.clock import ending
from kvloom.types.spec import ModelSpec
from tests.processes import DEADLINE
from tests.router.managed import spec

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
        b"[" + b",".join([short] * (MAX_CONFIG // len(short))) + b"]", type=tuple[ModelSpec, ...]
    )
    engine = msgspec.structs.replace(spec("u"), models=models)
    asked = Edit(units={"u": UnitEdit(engine=engine)})
    report = tmp_path / "report"
    report.write_bytes(msgspec.json.encode(asked) + b"\n")

    async def test() -> list[ChildReport]:
        async with asyncio.timeout(DEADLINE):
            component = await ChildProcess.start(str(report), "reporter")
            found = [one async for one in component.reports()]
            await component.ended()
            return found

    assert report.stat().st_size > 3 * MAX_CONFIG
    assert asyncio.run(test()) == [asked]


@pytest.mark.parametrize(
    ("said", "read", "killed"),
    [
        (b'{"type":"progress","text":"a"}\n{"type":"prog', [StartProgress("a")], False),
        (b'{"type":"progress","text":"a"}\nnonsense\n', [StartProgress("a")], True),
        (b'{"type":"gossip"}\n', [], True),
        (b"x" * (LONGEST_REPORT + 2), [], True),
    ],
    ids=["ended half way", "no JSON", "no report", "too long"],
)
def test_what_is_no_report_costs_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, read: list[ChildReport], killed: bool
) -> None:
    """Where it ended over a report nobody is killed."""
    tmp_path.joinpath("reporter.py").write_text(REPORTER + ("import signal; signal.pause()\n" * killed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "report").write_bytes(said)

    async def test() -> tuple[list[ChildReport], str]:
        async with asyncio.timeout(DEADLINE):
            component = await ChildProcess.start(str(tmp_path / "report"), "reporter")
            found = [one async for one in component.reports()]
            return found, await component.ended()

    assert asyncio.run(test()) == (read, ending(-signal.SIGKILL if killed else 0))


LEAVES_ONE_BEHIND = """\
import os, signal, sys
os.write(int(sys.argv[1]), b'{"type":"progress","text":"a"}\\n')
print("last words", flush=True)
if os.fork() == 0:
    signal.alarm(60)
    signal.pause()
"""


def test_its_pipes_end_with_it_though_another_process_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("leaver.py").write_text(LEAVES_ONE_BEHIND)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    async def test() -> None:
        async with asyncio.timeout(DEADLINE):
            process = await ChildProcess.start("leaver", "leaver")
            assert await process.ended() == ending(0)
            assert [report async for report in process.reports()] == [StartProgress("a")]
            assert [line async for line in process.logs()] == ["last words"]
        os.killpg(process.pid, signal.SIGKILL)

    asyncio.run(test())


def test_pipes_that_ended_with_it_are_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REST_SECONDS", 0.05)
    problems: list[object] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        process = await ChildProcess.start("ends", "this")
        assert await process.ended() == ending(0)
        await asyncio.sleep(0.2)

    asyncio.run(test())
    assert not problems


@pytest.mark.parametrize("fails", ["pipe", "connect", "spawn"])
def test_a_start_that_fails_leaves_no_pipe_open(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no")

    async def test() -> None:
        loop, pipe, made = asyncio.get_running_loop(), os.pipe, 0

        def two_pipes() -> tuple[int, int]:
            nonlocal made
            made += 1
            if made == 3:
                raise OSError("no")
            return pipe()

        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patched:
            if fails == "pipe":
                patched.setattr(os, "pipe", two_pipes)
            if fails == "connect":
                patched.setattr(loop, "connect_read_pipe", refuse)
            with pytest.raises(OSError, match="no"):
                await ChildProcess.start("x", "reporter", spawn=refuse)
        assert os.listdir("/proc/self/fd") == before

    asyncio.run(test())
