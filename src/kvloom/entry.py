"""Where `kvloom` begins, so that from there on Ctrl-C is one line, and a reader that goes is none."""

from __future__ import annotations

import os
import select
import sys
from typing import Final

INTERRUPTED: Final = 130
UNREAD: Final = 1
_GONE: Final = select.POLLERR | select.POLLHUP


def main() -> int:
    """The command's exit code. 130 where Ctrl-C ended it; where nobody reads any more what it prints it ends
    without a word and with 1, as Python's documentation has it of SIGPIPE."""
    try:
        try:
            from kvloom.cli import main as run  # noqa: PLC0415 - which takes its time, and may be interrupted

            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _silence():  # somebody else's
            raise
        return UNREAD
    except KeyboardInterrupt:
        try:
            print("kvloom: interrupted", file=sys.stderr, flush=True)
        except BrokenPipeError:
            _silence()  # or Python tries once more at its end, and ends with 120
        return INTERRUPTED


def _silence() -> bool:
    """Whether nobody reads standard output, or standard error. What is still to be written there gets lost,
    rather than told of when the process ends."""
    asked = select.poll()
    for number in (1, 2):
        asked.register(number, 0)
    unread = [number for number, events in asked.poll(0) if events & _GONE]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in unread:
        os.dup2(nowhere, number)
    os.close(nowhere)
    return bool(unread)
