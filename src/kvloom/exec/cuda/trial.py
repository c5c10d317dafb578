"""A trial of the kinds of work that lanes do, before anything is loaded. A refusal becomes an error that says
what has to be mended."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch

from kvloom.exec.cuda.operations import Operations
from kvloom.kernels import reference
from kvloom.kernels.driver import Driver

_SIZE: Final = 16
_FAR: Final = 0.02  # a rounding of bfloat16, twice


class Trial:
    """One kernel of each kind: Triton's, a product of cuBLAS', and torch's own."""

    def __init__(self, device: torch.device, operations: Operations) -> None:
        values = torch.linspace(-2, 2, 2 * _SIZE * _SIZE).view(_SIZE, 2 * _SIZE).bfloat16()
        self._gated = operations.gated
        self._values, self._x = values, values.to(device)
        self._one = torch.eye(_SIZE, dtype=torch.bfloat16, device=device)
        self._out = torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)

    def ask(self) -> None:
        """Asks the current stream for all of them."""
        torch.mm(self._gated(self._x, "silu"), self._one, out=self._out)

    def check(self) -> None:
        """Waits for the work that was asked for. Raises RuntimeError if a result is wrong."""
        found = self._out.float().cpu()
        self._out.zero_()
        # It is computed only now: what it leaves in freed memory would pass for the work of a kernel that
        # wrote nothing.
        wanted = reference.gated(self._values, "silu").float()
        if not bool(((found - wanted).abs() <= _FAR).all()):
            raise RuntimeError("its kernels compute what is wrong")

    def record(self, driver: Driver, stream: int) -> None:
        """Asks for them once more by a recording on a stream, which is the current one, and on which they
        have run. torch's own way would leave its allocator recording for ever if the stream cannot. Raises
        DriverError."""
        api: Any = driver.api
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver("cuStreamBeginCapture", stream, mode)
        try:
            self.ask()
        finally:
            graph = driver("cuStreamEndCapture", stream)
        ready = driver("cuGraphInstantiate", graph, 0)
        driver("cuGraphLaunch", ready, stream)
        driver("cuStreamSynchronize", stream)
        driver("cuGraphExecDestroy", ready)
        driver("cuGraphDestroy", graph)


def why_no_launch(error: BaseException) -> str:
    """Returns in one line why Triton launches no kernel, and what would be right. It builds a module with a C
    compiler and Python's headers at a machine's first launch, and keeps it in its cache."""
    text = " ".join(str(error).split())[:200]
    headers, named = Path(sysconfig.get_paths()["include"]), os.environ.get("CC")
    file = str(error.filename) if isinstance(error, OSError) and error.filename is not None else ""
    if "find C compiler" in text or (file and file == named):
        found = f"CC names {named}, which cannot be run" if named else "there is none"
        what = f"Triton builds its launcher with a C compiler, and {found}"
        right = "gcc or clang on the PATH (Debian: apt install gcc libc6-dev), or its path in CC"
    elif isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").exists():
        what = f"Triton builds its launcher with Python's headers, and there is no Python.h in {headers}"
        right = "a Python with its headers (Debian: apt install python3-dev)"
    elif isinstance(error, subprocess.CalledProcessError):
        what = f"Triton cannot build its launcher: {error.cmd[0]} ended with {error.returncode} (see above)"
        right = "a C compiler with the C library's headers (Debian: libc6-dev)"
    elif "ldconfig" in file or (isinstance(error, AssertionError) and "libcuda" in text):
        what = f"Triton finds no libcuda.so.1{f' without {file}' if file else ''}"
        right = "its folder in TRITON_LIBCUDA_PATH"
    elif file:
        assert isinstance(error, OSError)
        what = f"Triton cannot use {file} ({error.strerror})"
        right = "a folder that can be written in TRITON_CACHE_DIR"
    else:
        what, right = f"no kernel can be launched: {type(error).__name__}: {text}", "another GPU or driver"
    return f"{what}; {right}, or `device: cpu`, is right"
