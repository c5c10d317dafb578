"""Run on a GPU what CI cannot: `make gpu-check`, or python -m tools.gpu_check [--json FILE] [--no-tests].

First the tests that need a device, then figures against what the device allows in the same run: decode steps,
a long prefill, partitions, tasks through a mailbox, K and V between processes, decode beside prefill, and
transformers' own continuous batching. Nothing is downloaded; weights are random, of Llama-3-8B's shape.
Within nine minutes on an H100. Exits with 0 where all ran, 1 where something was wrong or could not run,
and 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.gpu_checks.report import Figure, Run

SECONDS = 480.0  # after which no check begins
END = 530.0  # by when the process has ended, whatever hangs
TESTS = ("tests/gpu", "tests/kernels/triton", "tests/transport/test_contract.py")
TEST_SECONDS = 200
KV_BYTES = 24 << 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Run on a GPU what CI cannot.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu-check.json"), help="where the figures go"
    )
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    given = parser.parse_args(arguments)
    missing = no_device()
    if missing:
        print(f"no CUDA device: {missing}")
        return 2
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a unit's process has it
    return _check(given.json, tests=not given.no_tests)


def no_device() -> str | None:
    """Why nothing can run here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no driver, or no GPU that it shows to this process"
    return None


def _check(file: Path, *, tests: bool) -> int:
    """Imports what needs a device."""
    from tools.gpu_checks.ceilings import ceilings  # noqa: PLC0415
    from tools.gpu_checks.ipc import between_processes  # noqa: PLC0415
    from tools.gpu_checks.peers import transformers_own  # noqa: PLC0415
    from tools.gpu_checks.report import Run  # noqa: PLC0415

    run = Run(SECONDS, file)
    with run.bounded(END):
        if tests:
            run.check("tests", run_tests)
        run.check("ceilings", ceilings)
        run.check("memory between processes", between_processes)
        run.check("kvloom's executor", lambda: _executor(run))
        run.check("transformers", transformers_own)
    run.close()
    return 1 if run.report.failures else 0


def _executor(run: Run) -> list[Figure]:
    """One executor for all that is measured of it; its memory is free afterwards."""
    from tools.gpu_checks import beside, llama, mailbox, peers, smids, steps  # noqa: PLC0415

    from kvloom.model.gpu.device import cuda_device  # noqa: PLC0415
    from kvloom.model.gpu.green import cut_green  # noqa: PLC0415
    from kvloom.model.gpu.operations import triton_operations  # noqa: PLC0415

    device = cuda_device(0, cut_green)
    run.check("partitions", lambda: smids.disjoint(device))
    run.check("a mailbox between two sides", lambda: mailbox.between_sides(device))
    executor = llama.load(device, triton_operations(), kv_bytes=KV_BYTES, most_running=128)
    jobs = llama.Jobs(executor, 512)
    run.check("decode steps", lambda: steps.decode_steps(jobs))
    run.check("long prefill", lambda: steps.long_prefill(jobs))
    run.check("decode beside prefill", lambda: beside.beside(jobs))
    run.check("64 requests", lambda: peers.ours(executor))
    executor.close()
    return []


def run_tests() -> list[Figure]:
    """Raises AssertionError with the tests that fail, TimeoutError with what pytest has said by then."""
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-rfE", "--tb=short"]
    with tempfile.TemporaryFile("w+") as said:
        pytest = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        late = False
        try:
            pytest.wait(TEST_SECONDS)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)  # and what it has started
            pytest.wait()
        said.seek(0)
        lines = said.read().strip().splitlines() or ["pytest said nothing"]
    print("\n".join(f"   {line}" for line in lines[-60:]), flush=True)
    if late:
        raise TimeoutError(f"not over after {TEST_SECONDS} s: {lines[-1]}")
    assert pytest.returncode == 0, "; ".join([lines[-1], *(one for one in lines if one.startswith("FAILED"))])
    return []


if __name__ == "__main__":
    sys.exit(main())
