"""Builds the stub, and runs a program over it in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).parent / "libcuda.c"
ROOT = Path(__file__).parents[4]


class NoStub(Exception):
    """The stub cannot stand for the driver here."""


def run(program: str, bindings: Path | None = None, **more: str) -> Any:
    """Returns what a function of `programs.py` returns. Skips the test where the stub cannot stand for the
    driver."""
    try:
        around = environment(bindings)
    except NoStub as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "tests.exec.cuda.stub.programs", program],
        env=around | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(bindings: Path | None = None) -> dict[str, str]:
    """Returns the environment of a process for which the stub is the driver. Raises NoStub."""
    library = _library()
    folders = [ROOT / "src", ROOT, *([] if bindings is None else [bindings])]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    stub = {"LD_LIBRARY_PATH": str(library), "TRITON_LIBCUDA_PATH": str(library)}
    return inherited | stub | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def _library() -> Path:
    found = importlib.util.find_spec("triton")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if torch.version.cuda is not None:
        raise NoStub("this torch is built for CUDA, which a stub of the driver is not enough for")
    if found is None or found.origin is None or compiler is None:
        raise NoStub("want triton, which brings the driver's declarations, and a C compiler")
    declarations = Path(found.origin).parent / "backends/nvidia/include"
    key = hashlib.sha256(SOURCE.read_bytes() + str(declarations).encode()).hexdigest()[:16]
    folder = Path(sys.prefix) / "stub-of-cuda" / key
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / library.name
            flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{declarations}", "-lpthread"]
            subprocess.run([compiler, str(SOURCE), "-o", str(made), *flags], check=True)
            made.replace(library)
    return folder
