"""Compiles the kernels into numba's cache: `python -m kvloom.kernels.cpu.warm`, done by `make setup`.

numba notices a change in a kernel's own file only. So a stamp beside the cache says of which sources
it is, and how far compiling has come: "some" if it has begun, "all" if it is done. If the sources were
others, what is cached is removed first. If compiling is interrupted, it goes on where it ended.
"""

import fcntl
import hashlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from llvmlite.binding import get_host_cpu_name

from kvloom.kernels.cpu import (
    affinity,
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
    affinity,
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
    """Returns all kernels, those that every engine needs first, in the order of MODULES."""
    members = [member for module in MODULES for member in vars(module).values()]
    return list(dict.fromkeys(member for member in members if isinstance(member, Kernel)))


_SOURCES: Final = Path(__file__).parents[1]
_SOME, _ALL = "some", "all"  # of the kernels are compiled, by a stamp


def is_warm() -> bool:
    """Returns whether all kernels of the present sources are in the cache for this processor, as far as the
    stamp knows."""
    return _read(_stamp()) == f"{_sources()} {_ALL}"


def warm(tell: Callable[[int, int], None]) -> None:
    """Compiles what is not in the cache, unless another process does so now: then it waits for that. tell: is
    called before each kernel with its number, from 1 on, and with how many there are."""
    stamp, sources, whole = _stamp(), _sources(), kernels()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    with stamp.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(_read(one).startswith(sources) for one in stamp.parent.glob("kernels-*")):
            for kernel in whole:
                for stale in kernel.cached():
                    stale.unlink(missing_ok=True)
            stamp.write_text(f"{sources} {_SOME}")
        for at, kernel in enumerate(whole, 1):
            tell(at, len(whole))
            kernel.compile()
        stamp.write_text(f"{sources} {_ALL}")


def _read(stamp: Path) -> str:
    return stamp.read_text() if stamp.is_file() else ""


def _stamp() -> Path:
    """Returns the stamp for this kind of processor. It lies where numba keeps the first kernel: beside the
    sources, in `NUMBA_CACHE_DIR`, or in the user's cache if the sources cannot be written to."""
    return kernels()[0].cache_folder / f"kernels-{get_host_cpu_name()}"


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
