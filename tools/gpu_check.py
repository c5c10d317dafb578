"""Run on a GPU what CI cannot: `make gpu-check`, or python -m tools.gpu_check [--json FILE] [--no-tests]
[--only PART ...] [--anew].

First the tests of exactness on the device; then figures against what the device allows in the same run, and
against what is wanted of them; at last, in what time is left, the kernels' own tests. Each part is a process
of its own that is ended when its time is over, and those to come have theirs kept for them. Nothing is
downloaded; weights are random, of the shapes of Llama-3-8B, Llama-3.2-1B and Qwen3-4B. It ends itself within
nine minutes. What a part has found is in the file once it has ended, and the next run of the same code on the
same device, driver and packages goes on from there: parts that are complete do not run again. It exits with 0
if all ran, whatever the figures; with 1 if something was wrong or could not run; with 2 if there is no CUDA
device.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from tools.gpu_checks.report import Report, resumed
from tools.gpu_checks.run import FIRST, LAST, ORDER, PARTS, SECONDS, Run, check, left_to_run

_ROOT: Final = Path(__file__).parents[1]
_CODE: Final = ("src", "tools", "tests", "benchmarks")
_PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "cuda-bindings",
    "numpy",
    "kvloom",
    "flash_attn_3",
    "sglang-kernel",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Run on a GPU what CI cannot.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu-check.json"), help="where the figures go, and are kept"
    )
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone, again if they have run")
    parser.add_argument("--anew", action="store_true", help="keep nothing of the run before")
    given = parser.parse_args(arguments)
    missing = no_device()
    if missing:
        print(f"no CUDA device: {missing}")
        return 2
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a unit's process has it
    report, told = Report(environment=environment()), ""
    if not given.anew:
        report, told = resumed(given.json, report.environment, ORDER)
    if told:
        print(told, flush=True)
    tests = () if given.no_tests else (FIRST, LAST)
    return check(Run(SECONDS, given.json, report), left_to_run(report, given.only, (*tests, *PARTS)))


def no_device() -> str | None:
    """Returns why nothing can run here; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no driver, or no GPU that it shows to this process"
    return None


def environment() -> dict[str, str]:
    """Returns what figures depend on. Those of another one are not comparable."""
    found: dict[str, Any] = {"commit": _commit(), "code": _code()}
    found |= {"machine": platform.platform(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["UUID"] = properties.uuid
        found["memory"] = f"{properties.total_memory:,} bytes"
        found["driver"] = _driver()
        found["CUDA of torch"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {name: str(value) for name, value in found.items()}


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return " ".join(file.read_text().splitlines()[0].split()) if file.is_file() else "unknown"


def _commit() -> str:
    """Returns the commit of the checkout, and whether the code has changed since; `unknown` if there is no
    checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}, changed" if _git("status", "--porcelain", "--", *_CODE) else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _code() -> str:
    """Returns a digest of all code, committed or not."""
    digest = hashlib.sha256()
    for file in sorted(path for folder in _CODE for path in (_ROOT / folder).rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
