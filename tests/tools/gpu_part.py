"""A part of the checks that ends in one way or another: `python -m tests.tools.gpu_part HOW FILE SECONDS`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def main(how: str, file: str, _: str) -> None:
    if how == "nothing":
        sys.exit(4)
    under_way = ["second"] if how in ("dies", "hangs") else []
    left = subprocess.Popen(["sleep", "300"]).pid if how == "hangs" else 0
    report = {
        "environment": {"left": str(left)},
        "figures": [{"name": "first", "value": 1.0, "unit": "s"}],
        "failures": {"second": "AssertionError: wrong"} if how == "fails" else {},
        "under_way": under_way,
    }
    Path(file).write_text(json.dumps(report))
    if how in ("ends", "fails"):
        return
    print("a word before", file=sys.stderr, flush=True)
    if how == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGABRT if how == "dies" else signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
