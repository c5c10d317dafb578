"""Compiles the kernels into numba's cache: `python -m kvloom.kernels.cpu.warm`, done by `make setup`.

numba notices a change in a kernel's own file only. So a stamp beside the cache says of which sources
it is, and how far compiling has come: "some" if it has begun, "all" if it is done. If the sources were
others, what is cached is removed first. If compiling is interrupted, it goes on where it ended.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from llvmlite.binding import get_host_cpu_name
from numba import config

from kvloom.kernels.cpu import (
    block_copy,
    decode_step,
    draw,
    elementwise,
    half,
    memory,
    offload_serve,
)
from kvloom.kernels.cpu.attention import decode, prefill
from kvloom.kernels.cpu.parallel import Kernel
from kvloom.kernels.cpu.quantized import lookup, panels

MODULES = (
    block_copy,
    decode,
    prefill,
    elementwise,
    decode_step,
    draw,
    half,
    memory,
    offload_serve,
    lookup,
    panels,
)


def kernels() -> list[Kernel]:
    """Returns all kernels, those that every engine needs first."""
    members = [member for module in MODULES for member in vars(module).values()]
    return list(dict.fromkeys(member for member in members if isinstance(member, Kernel)))


_SOURCES: Final = Path(__file__).parents[1]
_CACHE: Final = Path(config.CACHE_DIR) if config.CACHE_DIR else _SOURCES  # `NUMBA_CACHE_DIR`
_STAMPS: Final = _CACHE if config.CACHE_DIR else Path(__file__).parent / "__pycache__"


def is_warm() -> bool:
    """Returns whether all kernels of the present sources are in the cache for this processor, as far as the
    stamp knows."""
    return _stamp().is_file() and _stamp().read_text() == f"{_sources()} all"


def warm(tell: Callable[[int, int], None]) -> None:
    """Compiles what is not in the cache. tell: is called before each kernel with its number, from 1 on, and
    with how many there are."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    writable, sources = os.access(_CACHE, os.W_OK), _sources()
    if writable and not any(stamp.read_text().startswith(sources) for stamp in _STAMPS.glob("kernels-*")):
        for stale in _CACHE.rglob("*.nb[ic]"):
            stale.unlink(missing_ok=True)
        _STAMPS.mkdir(exist_ok=True)
        _stamp().write_text(f"{sources} some")
    whole = kernels()
    for at, kernel in enumerate(whole, 1):
        tell(at, len(whole))
        kernel.compile()
    if writable:
        _stamp().write_text(f"{sources} all")


def _stamp() -> Path:
    """Returns the stamp for this kind of processor."""
    return _STAMPS / f"kernels-{get_host_cpu_name()}"


def _sources() -> str:
    """Returns a digest of what the cache depends on."""
    found = hashlib.sha256("".join(metadata.version(name) for name in ("numba", "llvmlite")).encode())
    for file in sorted([*_SOURCES.glob("*.py"), *_SOURCES.glob("cpu/**/*.py")]):
        found.update(file.read_bytes())
    return found.hexdigest()


def main() -> None:
    begins, ends = ("\r", "") if sys.stdout.isatty() else ("", "\n")
    try:
        warm(lambda at, whole: print(f"{begins}kernel {at} of {whole}", end=ends, flush=True))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: what is compiled is kept, and the same command goes on from there")
    print(f"{begins}all kernels are compiled")


if __name__ == "__main__":
    main()
