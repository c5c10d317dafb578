"""A run of `make gpu-check` goes on where the one before it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tools.gpu_check import environment
from tools.gpu_checks.report import VERSION, Figure, Findings, Report, resumed, write
from tools.gpu_checks.run import ORDER, RATIO, left_to_run

from tests.processes import DEADLINE
from tests.tools.gpu_part import HOWS

PARTS = ("flash", "memory", "moving")
HERE = {"device": "one", "commit": "abc"}


def started(file: Path, device: str = "one", **hows: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.tools.gpu_run", str(file), device, *PARTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {HOWS: json.dumps(hows)},
        text=True,
    )


def run(file: Path, device: str = "one", **hows: str) -> tuple[list[str], str]:
    """Returns the parts that have begun, and the first line."""
    told = started(file, device, **hows).communicate(timeout=DEADLINE)[0].splitlines()
    return [line.split()[1] for line in told if line.startswith("-- ")], told[0]


def read(file: Path) -> Report:
    return msgspec.json.decode(file.read_bytes(), type=Report)


def test_parts_that_are_complete_do_not_run_again(tmp_path: Path) -> None:
    """Those that have failed do, and the file is one whole in the order of the parts."""
    file = tmp_path / "check.json"
    assert run(file, flash="fails", memory="ends", moving="dies") == (list(PARTS), "")
    assert list(read(file).failures) == ["flash: second", "moving: second"]
    assert len(read(file).figures) == len(PARTS)
    begun, told = run(file)
    assert begun == ["flash", "moving"]
    assert told == f"{file} has of this commit and device: memory"
    whole = read(file)
    assert (list(whole.parts), whole.failures, len(whole.figures)) == (list(PARTS), {}, len(PARTS))
    assert all(part.complete for part in whole.parts.values())
    assert run(file)[0] == []
    assert read(file).parts == whole.parts


@pytest.mark.parametrize("when", ["-- memory", "memory stops"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_is_gone_on_with(tmp_path: Path, end: signal.Signals, when: str) -> None:
    """At any time; and the part's process ends with it."""
    file = tmp_path / "check.json"
    process = started(file, memory="stops")
    assert process.stdout is not None
    while not process.stdout.readline().startswith(when):
        assert process.poll() is None
    process.send_signal(end)
    told = process.communicate(timeout=DEADLINE)[0]  # the part's process has this pipe, too
    assert process.returncode == (-end if end is signal.SIGKILL else 1)
    assert ("NOT RUN, OR WRONG: memory: was ended early" in told) == (end is not signal.SIGKILL)
    assert read(file).complete("flash")
    begun, _ = run(file)
    assert begun == ["memory", "moving"]
    assert read(file).failures == {}


def test_what_another_device_has_found_is_not_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    run(file)
    begun, told = run(file, device="two")
    assert begun == list(PARTS)
    assert told == f"{file} is of something else (device one, now two): all is measured anew"
    assert read(file).environment["device"] == "two"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content[:-40], "cannot be read"),
        (lambda _: b"", "cannot be read"),
        (lambda _: b"[1]", "cannot be read"),
        (lambda _: b"\xff", "cannot be read"),
        (lambda content: content.replace(b'"version": 2', b'"version": 3'), f"is in format 3, not {VERSION}"),
        (lambda _: b'{"environment": {}, "figures": []}', f"is in format 1, not {VERSION}"),
        (lambda content: content.replace(b'"figures": [', b'"figures": [3, ', 1), "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, change: Callable[[bytes], bytes], told: str) -> None:
    file = tmp_path / "check.json"
    write(file, Report(environment=HERE, parts={"flash": Findings(complete=True)}))
    assert list(resumed(file, HERE, ORDER)[0].parts) == ["flash"]
    file.write_bytes(change(file.read_bytes()))
    report, line = resumed(file, HERE, ORDER)
    assert report == Report(environment=HERE)
    assert line.startswith(f"{file} {told}")
    assert line.endswith(": all is measured anew")
    assert "\n" not in line


def test_parts_that_are_named_run_again(tmp_path: Path) -> None:
    """And what others have found stays; a part of another name, as of an older commit, does not."""
    file = tmp_path / "check.json"
    found = Findings(figures=[Figure(name="first", value=1.0, unit="s")], complete=True)
    write(file, Report(environment=HERE, parts={"moving": found, RATIO: found, "flash": found, "old": found}))
    report, _ = resumed(file, HERE, ORDER)
    assert list(report.parts) == ["flash", RATIO, "moving"]
    assert left_to_run(report, None, PARTS) == ["memory"]
    assert left_to_run(report, ["moving", "flash"], PARTS) == ["flash", "moving"]


def test_figures_depend_on_the_code() -> None:
    found = environment()
    assert found == environment()
    assert len(found["code"]) == 16
    assert found["torch"] != "not installed"
