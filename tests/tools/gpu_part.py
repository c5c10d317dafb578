"""A part of the checks that ends in one way or another: `python -m tests.tools.gpu_part HOW FILE SECONDS`, or
with the name of one of `make gpu-check`'s parts, as the environment says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.gpu_checks.report import Figure, Findings, write
from tools.gpu_checks.run import BOUNDS

HOWS: Final = "GPU_PARTS_END"
"""The environment's variable with how parts end, as JSON; those that are not in it end well."""


def main(part: str, file: str, _: str) -> None:
    hows = json.loads(os.environ.get(HOWS, "{}"))
    how = hows.get(part, "ends") if part in BOUNDS else part
    if how == "nothing":
        sys.exit(4)
    under_way = ["second"] if how in ("dies", "hangs", "stops") else []
    left = subprocess.Popen(["sleep", "300"]).pid if how == "hangs" else 0
    figures = [Figure(name="first", value=1.0, unit="s", note=str(left))]
    failures = {"second": "AssertionError: wrong"} if how == "fails" else {}
    write(Path(file), Findings(figures=figures, failures=failures, under_way=under_way))
    if how in ("ends", "fails"):
        return
    print(f"{part} {how}", flush=True)
    print("a word before", file=sys.stderr, flush=True)
    if how == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGABRT if how == "dies" else signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
