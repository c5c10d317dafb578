"""The kernels, compiled for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

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
    kernels = "decode", "merge", "prefill", "write", "copy", "norm", "rotate", "gated", "draw"
    for kernel in (*kernels, "serve", "post", "collect"):
        assert any(line.startswith(kernel) and " shared" in line for line in lines), kernel


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
