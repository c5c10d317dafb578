"""The parts of `make gpu-check`: their order, their time, and what becomes of those that fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from tools.gpu_checks.processes import MODULE, Sessions, apart, run_tests
from tools.gpu_checks.report import Findings, Report, reasons, write

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
RATIO: Final = "64 requests against transformers"
RATIO_OF: Final = frozenset({"executor", "transformers"})  # whose figures it takes; nothing else is run
PARTS: Final = tuple(part for part in BOUNDS if part not in (FIRST, LAST))
_AT: Final = [*BOUNDS].index("transformers") + 1
ORDER: Final = (*[*BOUNDS][:_AT], RATIO, *[*BOUNDS][_AT:])  # also of the file
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


def left_to_run(report: Report, only: Sequence[str] | None, wanted: Sequence[str]) -> list[str]:
    """Returns the parts of `only`; without, those of `wanted` that are not complete."""
    named = only or [part for part in wanted if not report.complete(part)]
    return [part for part in BOUNDS if part in named]


def check(run: Run, parts: Sequence[str]) -> int:
    """Runs these parts. Returns the exit status."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is known is printed then, too
    stale = not RATIO_OF.isdisjoint(parts) or not run.report.complete(RATIO)
    queue = [part for part in ORDER if part in parts or (part == RATIO and stale)]
    try:
        with run.bounded(END):
            for part in queue:
                if part != RATIO:
                    later = parts[parts.index(part) + 1 :]
                    run.part(part, partial(found_by, run, part, later), BOUNDS[part][1])
                elif run.report.parts.keys() >= RATIO_OF:
                    run.part(part, partial(_ratio, run.report))
    except KeyboardInterrupt:
        run.stop("was ended early")
    finally:
        signal.signal(signal.SIGTERM, before)
    run.close()
    return 0 if all(map(run.report.complete, parts)) and not run.report.failures else 1


def _ratio(report: Report) -> Findings:
    from tools.gpu_checks.peers import against_transformers  # noqa: PLC0415 -- it imports transformers

    return Findings(figures=list(against_transformers(report)))


def bound(left: float, part: str, later: Sequence[str]) -> float:
    """Returns the seconds that a part gets if `left` are left and the parts `later` are to come."""
    return min(BOUNDS[part][0], left - sum(BOUNDS[other][1] for other in later))


def found_by(run: Run, part: str, later: Sequence[str]) -> Findings:
    """Returns what a part has found in a process of its own. later: parts that are to come."""
    seconds = bound(run.left, part, later)
    if part in TESTS:
        run_tests(run.sessions, TESTS[part], seconds)
        return Findings()
    return apart(run.sessions, part, seconds, run.module)


class Run:
    """Runs parts one after the other, and begins none after `seconds`. The file has what was found at any
    time."""

    def __init__(self, seconds: float, file: Path, report: Report, module: str = MODULE) -> None:
        """`report` has what is known already, and gets what is found. `module` is as in `apart`."""
        self._began = time.monotonic()
        self._before = report.seconds
        self._seconds = seconds
        self._file = file
        self.module = module
        self.report = report
        self.sessions = Sessions()
        """The sessions of processes that parts have begun; they end with this run."""

    @property
    def left(self) -> float:
        """The seconds in which a part may still begin."""
        return self._seconds - (time.monotonic() - self._began)

    def part(self, name: str, measure: Callable[[], Findings], needs: float = 0.0) -> None:
        """Takes what `measure` finds in place of what was known of the part, or the reason why it raised. If
        fewer than `needs` seconds are left, the part is not begun, and what was known stays."""
        left = self.left
        if left < max(needs, 0.0):
            if not self.report.complete(name):
                findings = self.report.parts.setdefault(name, Findings())
                findings.failures[name] = f"not run: {max(left, 0):.0f} s were left, and it needs {needs:.0f}"
        else:
            self.report.parts[name] = Findings(under_way=[name])
            self._write()
            print(f"-- {name} ({left:.0f} s left)", flush=True)
            try:
                found = measure()
            except Exception as error:  # noqa: BLE001 -- the others are worth having
                found = Findings(failures={name: "; ".join(reasons(error))})
            self.report.parts[name] = found.ended(name, "")
        self._write()

    @contextmanager
    def bounded(self, seconds: float, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """Ends the process so many seconds from now, whatever it waits for, unless the block ends before."""
        timer = threading.Timer(seconds, self.give_up, (end,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def give_up(self, end: Callable[[int], object]) -> None:
        """Ends the process though a part is under way: a device that hangs cannot be asked to stop."""
        self.sessions.kill()
        self.stop("did not end")
        self.close()
        end(1)

    def stop(self, why: str) -> None:
        """Marks what is under way as failed. `why` is the reason."""
        for name, part in self.report.parts.items():
            if part.under_way:
                self.report.parts[name] = part.ended(name, why)

    def close(self) -> None:
        """Writes the whole report, and prints it."""
        self._write()
        print(f"\n{self.report.table()}\nwritten to {self._file}")
        again = [part for part in ORDER if not self.report.complete(part)]
        goes_on = f"run it again for what is not complete: {', '.join(again)}"
        print(goes_on if again else "all parts are complete; --anew measures them again", flush=True)

    def _write(self) -> None:
        self.report.parts = {part: self.report.parts[part] for part in ORDER if part in self.report.parts}
        self.report.seconds = self._before + time.monotonic() - self._began
        write(self._file, self.report)
