"""Compiles the kernels into numba's cache: `python -m kvloom.kernels.cpu.warm`, done by `make setup`.

numba notices a change in a kernel's own file only, so what is cached from older helpers is removed first.
"""

from pathlib import Path

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
    *(block_copy, decode, prefill, elementwise, decode_step, draw, half, memory, offload_serve),
    *(lookup, panels),
)


def kernels() -> list[Kernel]:
    """Returns all kernels, those that every engine needs first."""
    members = [member for module in MODULES for member in vars(module).values()]
    return list(dict.fromkeys(member for member in members if isinstance(member, Kernel)))


def warm() -> int:
    """Returns the number of kernels compiled."""
    for stale in Path(__file__).parent.rglob("__pycache__/*.nb?"):
        stale.unlink()
    compiled = kernels()
    for kernel in compiled:
        kernel.compile()
    return len(compiled)


if __name__ == "__main__":
    print(f"{warm()} kernels compiled")
