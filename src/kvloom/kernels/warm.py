"""Compile the kernels into numba's cache: `python -m kvloom.kernels.warm`, done by `make setup`.

numba notices a change in a kernel's own file only, so what is cached from older helpers is removed first.
"""

from pathlib import Path

from kvloom.kernels import block_copy, cpu_attention, cpu_elementwise, cpu_poll, cpu_step, cpu_watch, signals
from kvloom.kernels.parallel import Kernel


def warm() -> int:
    """Returns the number of kernels compiled."""
    for stale in (Path(__file__).parent / "__pycache__").glob("*.nb?"):
        stale.unlink()
    modules = block_copy, cpu_attention, cpu_elementwise, cpu_poll, cpu_step, cpu_watch, signals
    members = [member for module in modules for member in vars(module).values()]
    kernels = {member for member in members if isinstance(member, Kernel)}
    for compiled in kernels:
        compiled.compile()
    return len(kernels)


if __name__ == "__main__":
    print(f"{warm()} kernels compiled")
