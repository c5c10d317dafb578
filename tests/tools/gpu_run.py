"""Runs parts as `make gpu-check` does, with those of `tests.tools.gpu_part` in their place, on what is said
to be the device: `python -m tests.tools.gpu_run FILE DEVICE PART ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.gpu_checks.report import resumed
from tools.gpu_checks.run import ORDER, Run, check, left_to_run

if __name__ == "__main__":
    file, device, *parts = sys.argv[1:]
    report, told = resumed(Path(file), {"device": device, "commit": "abc"}, ORDER)
    print(told)
    run = Run(60, Path(file), report, "tests.tools.gpu_part")
    sys.exit(check(run, left_to_run(report, None, parts)))
