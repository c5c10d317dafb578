"""A part of the checks in a process of its own: what fails on a device fails for its whole process, and what
hangs there can only be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from tools.gpu_checks.report import Findings
from tools.gpu_checks.sessions import Sessions

MODULE = "tools.gpu_checks"


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
