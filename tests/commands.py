"""`kvloom …` without a process of its own, which costs half a second."""

from __future__ import annotations

from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess

from kvloom.cli.__main__ import main


def kvloom(*arguments: str, folder: Path | str = ".") -> CompletedProcess[str]:
    """What it would exit with and has said, run in `folder`."""
    out, err = StringIO(), StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
