"""Parts of the checks, and pytest, in processes of their own, which end with all that they have started: what
fails on a device fails for its whole process, and what hangs there can only be killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import msgspec
from tools.gpu_checks.report import Findings

_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlives the exec
if os.getppid() == int(sys.argv[1]):  # or else the parent has ended before that
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Sessions:
    """Those that are under way."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    @contextmanager
    def started(
        self, command: Sequence[str], *, out: IO[str] | None = None, err: IO[str] | int | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Ended with what it has started, at the latest when this is left; by itself when this process is
        gone, or else it would use the device beside the next run."""
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command],
            stdout=out,
            stderr=err,
            start_new_session=True,
            text=True,
        )
        self._running.append(process)
        try:
            yield process
        finally:
            _kill(process)
            self._running.remove(process)
            process.wait()

    def kill(self) -> None:
        """All of them, from any thread. Who waits for one finds it ended."""
        for process in list(self._running):
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


MODULE: Final = "tools.gpu_checks.parts"


def apart(sessions: Sessions, part: str, seconds: float, module: str = MODULE) -> Findings:
    """Returns what `python -m MODULE PART FILE SECONDS` has found when it ends, or is ended, with all that it
    has started."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", module, part, str(file), f"{seconds:.1f}"]
        with tempfile.TemporaryFile("w+") as complaints:
            with sessions.started(command, err=complaints) as process:
                try:
                    why = ended(process.wait(seconds))
                except subprocess.TimeoutExpired:
                    why = f"did not end within {seconds:.0f} s"
            complaints.seek(0)
            lines = complaints.read().strip().splitlines()
        print("\n".join(f"   {line}" for line in lines[-12:]), flush=True)
        if why and lines:
            why = f"{why}: {lines[-1][:200]}"
        known = msgspec.json.decode(file.read_bytes(), type=Findings) if file.exists() else Findings()
        return known.ended(part, why)


def ended(code: int) -> str:
    """Empty where all is well."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with {code}" if code else ""


_LAST: Final = 60  # lines of what it says, which are shown
_BAD: Final = ("FAILED", "ERROR")
_RESULT: Final = "(?P<result>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
# as one process tells of a test, as several do (pytest-xdist), and how both tell how many there are
_ALONE: Final = re.compile(rf"^(?P<test>\S+::.*?) {_RESULT}\b.*\[ *\d+%\]$")
_BESIDE: Final = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_RESULT} (?P<test>\S+::.*?) *$")
_MANY: Final = re.compile(r"\bcollected (\d+) items?|^\d+ workers? \[(\d+) items?\]")
_KEPT: Final = re.compile(r"/ (\d+) selected")


def run_tests(sessions: Sessions, tests: Sequence[str], seconds: float) -> None:
    """Prints how many passed, failed and had not ended. Raises AssertionError with those that fail,
    TimeoutError with the same where it has to be ended."""
    command = [sys.executable, "-u", "-m", "pytest", *tests, "-vv", "-rfE", "--tb=short", *_side_by_side()]
    with tempfile.TemporaryFile("w+") as said:
        late = False
        with sessions.started(command, out=said, err=subprocess.STDOUT) as pytest:
            try:
                pytest.wait(seconds)
            except subprocess.TimeoutExpired:
                late = True
        said.seek(0)
        lines = said.read().strip().splitlines() or ["pytest said nothing"]
    print("\n".join(f"   {line}" for line in lines[-_LAST:]), flush=True)
    told = counted(lines)
    print(f"   {told}", flush=True)
    if late:
        raise TimeoutError(f"not over after {seconds:.0f} s: {told}")
    assert pytest.returncode == 0, told if "::" in told else f"{told}; {lines[-1]}"


def counted(lines: Sequence[str]) -> str:
    """Of what pytest says: how many passed, failed, were left out or had not ended; those that failed."""
    found: dict[str, str] = {}
    whole = 0
    for line in lines:
        if one := _ALONE.match(line) or _BESIDE.match(line):
            found[one["test"]] = one["result"]
        elif many := _MANY.search(line):
            kept = _KEPT.search(line)
            whole = int(kept[1] if kept else many[1] or many[2])
    results = list(found.values())
    failed = [test for test, result in found.items() if result in _BAD]
    passed, skipped = results.count("PASSED"), results.count("SKIPPED")
    left = max(0, whole - len(results))
    count = f"{passed} passed, {len(failed)} failed, {skipped} left out, {left} not ended"
    return "; ".join([count, *failed])


def _side_by_side() -> list[str]:
    """Most of a test's time here is the host's: it loads, and compiles kernels."""
    processes = min(6, (os.cpu_count() or 1) // 2)
    if processes < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["--numprocesses", str(processes)]
