"""Runs a compiled kernel on the calling thread's share of the cores: on torch's own OpenMP workers.

numba's omp layer would need the system's libgomp, and keep a second team beside torch's for every calling
thread (no slower when measured, but twice the threads). Here matrix products and kernels share one team,
torch's wheel is all that is needed, and `torch.set_num_threads`, which holds per calling thread, is a
partition for both. If torch has a runtime without libgomp's entry point, kernels run serially.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, from_dtype, types
from numba.core.caching import FunctionCache


@cache
def _team_entry() -> Any:
    """Returns the function by which OpenMP's compilers run a parallel region; None if there is none."""
    try:
        # a lookup through torch's extension module finds the very runtime that torch itself runs on
        entry = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


class Kernel:
    """A function over one argument structure, entered by every thread of a team at once.

    The body shares out the work itself, by an atomic counter in the structure, and so does not care how many
    threads come. It runs without the GIL. It is compiled at the first call, or read from numba's cache.
    """

    def __init__(self, body: Callable[[Any], None], arguments: type[ctypes.Structure]) -> None:
        self.body = body
        self.arguments = arguments
        self._compiled: Any = None
        self._enter: Any = None
        self._address = 0

    def __call__(self, arguments: ctypes.Structure, threads: int) -> None:
        """Runs on `threads` threads, the calling one among them, and returns when all are done."""
        self.at(ctypes.addressof(arguments), threads)

    def at(self, address: int, threads: int) -> None:
        """Runs the same with the structure at this address, which the caller keeps alive."""
        if self._enter is None:
            self.compile()
        entry = _team_entry() if threads > 1 else None
        if entry is None:
            self._enter(address)
        else:
            entry(self._address, address, threads, 0)

    @property
    def cache_folder(self) -> Path:
        """Returns the folder in which numba keeps the compiled body. Raises OSError if there is none that can
        be written to."""
        return Path(FunctionCache(self.body).cache_path)

    def cached(self) -> list[Path]:
        """Returns the files of the compiled body, of any sources and processor."""
        return [
            *self.cache_folder.glob(
                f"{Path(self.body.__code__.co_filename).stem}.{self.body.__qualname__}-*.nb[ic]"
            )
        ]

    def compile(self) -> None:
        """Compiles the body, or reads it from numba's cache, if that was not done yet."""
        if self._enter is not None:
            return
        record = from_dtype(np.dtype(self.arguments))
        self._compiled = cfunc(types.void(types.CPointer(record)), cache=True, error_model="numpy")(self.body)
        self._address = self._compiled.address
        self._compiled._library._shared_module = None  # LLVM's form of it, for others to call: 2 MB each
        self._enter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)


def kernel(arguments: type[ctypes.Structure]) -> Callable[[Callable[[Any], None]], Kernel]:
    """Makes a kernel of the function that it decorates, which takes a pointer to such a structure."""
    return lambda body: Kernel(body, arguments)
