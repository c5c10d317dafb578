"""A process for the fork server's tests, which tells what it is: `python -m tests.serve.forked FD NAME`. Its
name says how it ends."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np

from kvloom.serve.processes.messages import StartProgress
from kvloom.serve.processes.parent import Parent, run_child
from kvloom.types.errors import ConfigError


def main(parent: Parent) -> None:
    """Returns, fails, or waits for a signal, which comes when the supervisor has ended."""
    name = sys.argv[2]
    told = {
        "arguments": sys.argv[1:],
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "environment": os.environ.get("WORD"),
        "draws": [random.random(), float(np.random.random())],
        "collects": gc.isenabled(),
        "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],  # the last is the folder's
    }
    print("this is", name, flush=True)
    parent.report(StartProgress(json.dumps(told)))
    match name:
        case "refuse":
            raise ConfigError("this is no good")
        case "raise":
            raise RuntimeError("a defect")
        case "wait":
            parent.watch(Path("/no/such/folder"))
            signal.pause()


if __name__ == "__main__":
    run_child(main)
