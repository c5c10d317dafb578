"""Run on a GPU what CI cannot: `make gpu-check`, or python -m tools.gpu_check [--json FILE] [--no-tests]
[--only PART ...].

First the tests of exactness on the device; then figures against what the device allows in the same run, and
against what is wanted of them; at last, in what time is left, the kernels' own tests. Each part is a process
of its own that is ended when its time is over, and those to come have theirs kept for them. Nothing is
downloaded; weights are random, of the shapes of Llama-3-8B, Llama-3.2-1B and Qwen3-4B. It ends itself within
nine minutes. It exits with 0 if all ran, whatever the figures; with 1 if something was wrong or could not
run; with 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from tools.gpu_checks.report import Figure, Run

SECONDS: Final = 515.0  # after which no part begins, and each is ended
END: Final = 530.0  # by when the process has ended, whatever hangs
FIRST, LAST = "exactness", "kernels"  # are tests
# By part, in the order in which they run: its seconds at most, and those without which it does not begin,
# which are kept for it. What is first counts most, but what is short does not wait for what is long.
BOUNDS: Final = {
    FIRST: (105, 30),
    "executor": (85, 45),
    "flash": (15, 10),
    "transformers": (45, 25),
    "memory": (20, 12),
    "several": (110, 60),
    "moving": (55, 35),
    "weaving": (60, 40),
    LAST: (SECONDS, 20),
}
PARTS: Final = tuple(part for part in BOUNDS if part not in (FIRST, LAST))
TESTS: Final = {
    FIRST: (  # the longest contexts first; of the transports' contract the kind between GPUs' processes alone
        "tests/gpu/test_long_contexts.py",
        "tests/gpu/test_attention.py",
        "tests/gpu/test_served.py",
        "tests/gpu/test_apart.py",
        "tests/gpu/test_woven.py",
        "tests/gpu/test_partitions.py",
        "tests/gpu/test_sleeping.py",
        "tests/gpu/test_ranks.py",
        "tests/transfer/test_contract.py",
        "-k",
        "gpu or cuda",
    ),
    LAST: ("tests/kernels/cuda",),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Run on a GPU what CI cannot.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu-check.json"), help="where the figures go"
    )
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    given = parser.parse_args(arguments)
    missing = no_device()
    if missing:
        print(f"no CUDA device: {missing}")
        return 2
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a unit's process has it
    tests = not given.no_tests and not given.only
    wanted = [part for part in BOUNDS if (part in (given.only or PARTS) if part in PARTS else tests)]
    return _check(given.json, wanted)


def no_device() -> str | None:
    """Why nothing can run here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no driver, or no GPU that it shows to this process"
    return None


def _check(file: Path, parts: Sequence[str]) -> int:
    from tools.gpu_checks.peers import against_transformers  # noqa: PLC0415 -- it imports transformers
    from tools.gpu_checks.report import Run  # noqa: PLC0415

    run = Run(SECONDS, file)
    with run.bounded(END):
        for i, part in enumerate(parts):
            run_part(run, part, parts[i + 1 :])
            if part == "transformers" and "executor" in parts:
                run.check("64 requests against transformers", lambda: against_transformers(run.report))
    run.close()
    return 1 if run.report.failures else 0


def bound(left: float, part: str, later: Sequence[str]) -> float:
    """Seconds for a part when `left` are left and `later` are to come."""
    return min(BOUNDS[part][0], left - sum(BOUNDS[other][1] for other in later))


def run_part(run: Run, part: str, later: Sequence[str]) -> None:
    """In a process of its own. What it finds counts, however it ends. later: parts that are to come."""
    from tools.gpu_checks.apart import apart  # noqa: PLC0415
    from tools.gpu_checks.pytests import run_tests  # noqa: PLC0415

    def measure() -> list[Figure]:
        seconds = bound(run.left, part, later)
        if part in TESTS:
            run_tests(run.sessions, TESTS[part], seconds)
        else:
            report, why = apart(run.sessions, part, seconds)
            run.report.take(report, part, why)
        return []

    run.check(part, measure, BOUNDS[part][1])


if __name__ == "__main__":
    sys.exit(main())
