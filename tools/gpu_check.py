"""Run on a GPU what CI cannot: `make gpu-check`, or python -m tools.gpu_check [--json FILE] [--no-tests]
[--only PART ...].

First the tests of exactness on the device; then figures against what the device allows in the same run, and
against what is wanted of them; at last, in what time is left, the kernels' own tests. Each part is a process
of its own that is ended when its time is over. Nothing is downloaded; weights are random, of the shapes of
Llama-3-8B, Llama-3.2-1B and Qwen3-4B. Within nine minutes on an H100. Exits with 0 where all ran, whatever
the figures; 1 where something was wrong or could not run; 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from tools.gpu_checks.report import Figure, Run

SECONDS = 515.0  # after which no part begins, and each is ended
END = 530.0  # by when the process has ended, whatever hangs
EXACTNESS = ("tests/gpu", "tests/transport/test_contract.py")
KERNELS = ("tests/kernels/triton",)
# What comes first counts most. By each part's name: its seconds at most, and those without which it does not
# begin.
PARTS: Final = {
    "executor": (120, 45),
    "several": (150, 70),
    "moving": (75, 35),
    "weaving": (75, 35),
    "transformers": (60, 25),
    "memory": (35, 15),
}
EXACT_SECONDS, KERNEL_SECONDS, LEAST_SECONDS = 125, 150, 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Run on a GPU what CI cannot.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu-check.json"), help="where the figures go"
    )
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    given = parser.parse_args(arguments)
    missing = no_device()
    if missing:
        print(f"no CUDA device: {missing}")
        return 2
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a unit's process has it
    return _check(given.json, given.only or list(PARTS), tests=not given.no_tests and not given.only)


def no_device() -> str | None:
    """Why nothing can run here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no driver, or no GPU that it shows to this process"
    return None


def _check(file: Path, parts: Sequence[str], *, tests: bool) -> int:
    from tools.gpu_checks.peers import against_transformers  # noqa: PLC0415 -- it imports transformers
    from tools.gpu_checks.report import Run  # noqa: PLC0415

    run = Run(SECONDS, file)
    with run.bounded(END):
        if tests:
            run.check("exactness", lambda: run_tests(EXACTNESS, min(run.left, EXACT_SECONDS)))
        for part in parts:
            run_part(run, part, *PARTS[part])
        if {"executor", "transformers"} <= set(parts):
            run.check("64 requests against transformers", lambda: against_transformers(run.report))
        if tests:
            least = LEAST_SECONDS
            run.check("kernels", lambda: run_tests(KERNELS, min(run.left, KERNEL_SECONDS)), least)
    run.close()
    return 1 if run.report.failures else 0


def run_part(run: Run, part: str, most: float, least: float) -> None:
    """In a process of its own. What it finds counts, however it ends."""
    from tools.gpu_checks.apart import apart  # noqa: PLC0415

    def measure() -> list[Figure]:
        report, why = apart(part, min(run.left, most))
        run.report.take(report, part, why)
        return []

    run.check(part, measure, least)


def run_tests(tests: Sequence[str], seconds: float) -> list[Figure]:
    """Raises AssertionError with the tests that fail, TimeoutError with what pytest has said by then."""
    from tools.gpu_checks.apart import kill  # noqa: PLC0415

    command = [sys.executable, "-m", "pytest", *tests, "-q", "-rfE", "--tb=short", *_side_by_side()]
    with tempfile.TemporaryFile("w+") as said:
        pytest = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        late = False
        try:
            pytest.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            kill(pytest)  # and what it has started
        said.seek(0)
        lines = said.read().strip().splitlines() or ["pytest said nothing"]
    print("\n".join(f"   {line}" for line in lines[-60:]), flush=True)
    if late:
        raise TimeoutError(f"not over after {seconds:.0f} s: {lines[-1]}")
    assert pytest.returncode == 0, "; ".join([lines[-1], *(one for one in lines if one.startswith("FAILED"))])
    return []


def _side_by_side() -> list[str]:
    """Most of a test's time here is the host's: it loads, and compiles kernels."""
    processes = min(6, (os.cpu_count() or 1) // 2)
    if processes < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["--numprocesses", str(processes)]


if __name__ == "__main__":
    sys.exit(main())
