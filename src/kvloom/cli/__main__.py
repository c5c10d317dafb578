"""The first and the last moment of `kvloom`, which is also `python -m kvloom.cli`: Ctrl-C is one line, and a
reader that goes is none.

Everything else is imported after that is so, because importing takes its time and may be interrupted too."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import Final

INTERRUPTED: Final = 130
UNREAD: Final = 1
_GONE: Final = select.POLLERR | select.POLLHUP


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name and returns its exit code: 130 if Ctrl-C ended it. If nobody
    reads any more what it prints, it ends without a word and with 1, as Python's documentation of SIGPIPE
    advises."""
    try:
        try:
            from kvloom.cli.app import run  # noqa: PLC0415

            return run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _silence():  # the pipe is another one, and its end is an error
            raise
        return UNREAD
    except KeyboardInterrupt:
        try:
            print("kvloom: interrupted", file=sys.stderr, flush=True)
        except BrokenPipeError:
            _silence()  # or Python tries once more at its end, and ends with 120
        return INTERRUPTED


def _silence() -> bool:
    """Returns whether nobody reads standard output, or standard error. What is still to be written there is
    dropped, so that the end of the process raises no error about it."""
    asked = select.poll()
    for number in (1, 2):
        asked.register(number, 0)
    unread = [number for number, events in asked.poll(0) if events & _GONE]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in unread:
        os.dup2(nowhere, number)
    os.close(nowhere)
    return bool(unread)


if __name__ == "__main__":
    sys.exit(main())
