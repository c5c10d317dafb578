"""The kernels, compiled for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from kvloom.kernels.cuda import compile as compiling
from kvloom.kernels.cuda.decode import decode_attention
from kvloom.kernels.cuda.launch import Launch
from kvloom.kernels.reference import block_view


def test_all_that_is_served_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvloom.kernels.cuda.compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(list(compiling.served())), done.stdout
    kernels = (
        "decode",
        "merge",
        "prefill",
        "write",
        "copy",
        "norm",
        "rotate",
        "gated",
        "draw",
        "product",
        "round",
    )
    for kernel in (*kernels, "serve", "post", "collect"):
        assert any(line.startswith(kernel) and " shared" in line for line in lines), kernel
    assert all(line.endswith(" B stack") for line in lines)  # or spills would not have been looked for


def test_what_is_compiled_badly_is_told() -> None:
    """Of a launch whose code is all that it is meant to be, and of code that is nothing of it."""
    launch = next(one for _, one in compiling.served() if one.kernel.__name__ == "_prefill")
    serve = next(one for _, one in compiling.served() if one.kernel.__name__ == "_serve")

    def found(launch: Launch, ptx: str, shared: int = 0, capability: int = 90) -> list[str]:
        made = SimpleNamespace(asm={"ptx": ptx, "cubin": b""}, metadata=SimpleNamespace(shared=shared))
        return list(compiling.faults(launch, made, capability))

    assert launch.arguments["ROWS"] >= 64
    assert found(launch, "wgmma.mma_async") == found(launch, "mma.sync", capability=80) == []
    assert found(launch, "mma.sync") == ["does not multiply by wgmma.mma_async"]
    (fault,) = found(launch, "wgmma.mma_async", shared=1 << 18)
    assert fault.startswith("wants 262144 bytes of shared memory, the GPU has 232448")
    assert found(serve, "ld.global.sys.acquire") == ["has no global.sys.release"]


def _decode(sequences: int, pages: int) -> Launch:
    """A decode step of `sequences` with a table for `pages` pages each."""
    values = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    arena = block_view(values, 4096, 64, torch.bfloat16)
    page_map, tables, lengths = (
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in ((9, 3, 2), (sequences, pages), (32,))
    )
    q = torch.empty(sequences, 4, 64, dtype=torch.bfloat16, device="meta")
    return decode_attention.launch(
        q, q, arena, page_map, 1, tables, lengths[sequences % 4 :][:sequences], 1.0
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads how the interpreter's kernels are declared")
def test_a_step_like_another_is_not_compiled_again() -> None:
    """What changes from step to step is neither a constant nor known to be aligned."""

    def specialised(launch: Launch) -> tuple[object, ...]:
        kernel = JITFunction(launch.kernel.fn, do_not_specialize=launch.kernel.kwargs["do_not_specialize"])
        source = compiling.source(Launch(kernel, launch.grid, launch.arguments))
        return source.signature, source.constants, source.attrs

    assert specialised(_decode(1, 1)) == specialised(_decode(3, 16)) == specialised(_decode(16, 7))
