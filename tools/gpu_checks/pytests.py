"""pytest in a process of its own, and what each test came to by the time that it is ended."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Final

from tools.gpu_checks.sessions import Sessions

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
