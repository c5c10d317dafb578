"""What the fork server of tests imports last: its processes need not load the kernels from their cache."""

from __future__ import annotations

from kvloom.kernels.cpu.warm import kernels

for kernel in kernels():
    kernel.compile()
