"""Compiles the kernels for a GPU that need not be there.

`python -m kvloom.kernels.cuda.compile` compiles for Hopper, and with the argument 80 for Ampere.

Each is launched as it is when it serves, but on tensors without memory; what Triton would specialise on such
a launch is compiled down to a cubin. It prints a line each, and exits with 1 if one does not compile, wants
more shared memory than there is, spills registers, multiplies by other instructions than it is meant to, or
lacks an order towards other processes. The latter three are looked for in what the compiler has made.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvloom.kernels.cuda.copy import block_tables, copy_blocks, copy_pages
from kvloom.kernels.cuda.decode import Workspace, decode_attention, list_parts
from kvloom.kernels.cuda.draw import draw_launch
from kvloom.kernels.cuda.elementwise import advance, gated_launch, norm_launch, rotate, write_kv
from kvloom.kernels.cuda.launch import Launch
from kvloom.kernels.cuda.offload_ask import collect, post
from kvloom.kernels.cuda.offload_serve import serve
from kvloom.kernels.cuda.prefill import prefill_attention
from kvloom.kernels.cuda.quantized import quantized_launch, round_launch
from kvloom.kernels.cuda.reference import FP8_CAPABILITY
from kvloom.kernels.mailbox import LINE, NOTE, WORDS, BorrowerState, LenderState, LentArena, MailboxTensors
from kvloom.kernels.reference import Activation, block_view

Named = tuple[str, Launch]
_BLOCK = 16384
_SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have, by compute capability
_ORDERS = {  # towards other processes, that PTX must have; a plain load or store would do without
    "_serve": ("global.sys.acquire", "global.sys.release"),
    "_post": ("global.sys.release",),
    "_collect": ("global.sys.acquire",),
}
_LOAD, _EXCHANGE, _FENCE = r"LDG\S*\.STRONG\.SYS", r"EXCH\S*\.STRONG\.SYS", r"MEMBAR\S*\.SYS"
_MACHINE_ORDERS = {  # the same in the machine's own code
    "_serve": (_LOAD, _EXCHANGE, _FENCE),
    "_post": (_EXCHANGE, _FENCE),
    "_collect": (_LOAD,),
}
_WARPGROUP_ROWS = 64  # of the least product of a warpgroup
_LEFT = {"_prefill": "ROWS", "_decode": "ROWS", "_quantized": "OUTPUTS"}  # rows of products' left operands
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    window: int = 0,
    softcap: float = 0.0,
    split: bool = True,
    kept: torch.dtype | None = None,
) -> Iterator[Named]:
    """Yields decode, in parts or not, and prefill of a model of 4 KV heads and 8 layers. kept: the format of
    K and V, if it is another."""
    kv_heads, batch, rows = 4, 16, 512
    arena = block_view(_empty(1 << 33, dtype=torch.uint8), _BLOCK, head_dim, kept or dtype)
    cache = arena, _empty(1024, 8, kv_heads), 3, _empty(batch, 64)
    form = head_dim**-0.5, window, softcap
    name = f"{str(dtype).removeprefix('torch.')} D={head_dim} group={group}"
    name += f"{' window' if window else ''}{' softcap' if softcap else ''}{' FP8' if kept else ''}"
    q = _empty(batch, kv_heads * group, head_dim, dtype=dtype)
    room = Workspace.make(64, batch, kv_heads * group, head_dim, torch.device("meta")) if split else None
    launch = decode_attention.launch(q, q, *cache, _empty(batch), *form, workspace=room)
    yield f"decode {name}{' in parts' if split else ''}", launch
    if launch.then is not None:
        yield f"merge {name}", launch.then
    q = _empty(rows, kv_heads * group, head_dim, dtype=dtype)
    yield f"prefill {name}", prefill_attention.launch(q, q, *cache, _empty(batch), _empty(batch + 1), *form)


def _around(dtype: torch.dtype, head_dim: int) -> Iterator[Named]:
    """Yields what else a layer does."""
    rows, kv_heads, size = 512, 4, 4096
    arena = block_view(_empty(1 << 33, dtype=torch.uint8), _BLOCK, head_dim, dtype)
    name = f"{str(dtype).removeprefix('torch.')} D={head_dim}"
    fused = _empty(rows, 4 * kv_heads, head_dim, dtype=dtype)
    q, k, v = fused[:, : 2 * kv_heads], fused[:, -2 * kv_heads : -kv_heads], fused[:, -kv_heads:]
    slots = _empty(1024, 8, kv_heads), 3, k, v, _empty(rows), _empty(rows)
    yield f"write {name}", write_kv.launch(arena, *slots)
    angles = _empty(rows, head_dim, dtype=dtype)
    yield f"rotate {name}", rotate.launch(q, k, angles, angles)
    x, weight = _empty(rows, size, dtype=dtype), _empty(size, dtype=dtype)
    yield f"norm {name} H={size}", norm_launch(x, x, weight, 1e-6)
    yield f"norm {name} H={size} offset", norm_launch(x, x, weight, 1e-6, 1.0)
    yield f"norm {name} H={size} of a sum", norm_launch(x, x, weight, 1e-6, residual=x)
    yield f"norm {name} of heads", norm_launch(q, q, _empty(head_dim, dtype=dtype), 1e-6)
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for activation in activations:
        yield f"gated {name} {activation}", gated_launch(x, x, activation)


def _products(dtype: torch.dtype, kind: torch.dtype, group: int, *, offsets: bool = False) -> Iterator[Named]:
    """Yields products over a weight of few bits, of as many rows as take tiles of their own. kind: of its
    codes, of which uint8 are two of 4 bits."""
    outputs, columns = 6144, 4096
    codes = _empty(outputs, columns // 2 if kind == torch.uint8 else columns, dtype=kind)
    scales = _empty(outputs, columns // group, dtype=torch.float16)
    names = (str(one).removeprefix("torch.") for one in (dtype, kind))
    name = f"product {' '.join(names)} of {group}{' offsets' if offsets else ''}"
    for rows in (1, 32, 64, 512):
        x, out = (_empty(rows, size, dtype=dtype) for size in (columns, outputs))
        given = codes, scales, scales if offsets else None, _empty(outputs, dtype=dtype)
        yield f"{name}, {rows} rows", quantized_launch(out, x, *given)


def _eight_bit_floats() -> Iterator[Named]:
    yield from _products(torch.bfloat16, torch.float8_e4m3fn, 4096)
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 256)):
        yield from _attention(dtype, head_dim, group=4, kept=torch.float8_e4m3fn)
    arena = block_view(_empty(1 << 33, dtype=torch.uint8), _BLOCK, 128, torch.float8_e4m3fn)
    k, slots = _empty(512, 4, 128, dtype=torch.bfloat16), _empty(512)
    yield "write FP8", write_kv.launch(arena, _empty(1024, 8, 4), 3, k, k, slots, slots)
    scales, out = _empty(512, 1, dtype=torch.float32), _empty(512, 4096, dtype=torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = _empty(512, 4096, dtype=dtype)
        yield f"round {str(dtype).removeprefix('torch.')}", round_launch(out, scales, x)


def _others() -> Iterator[Named]:
    memory, ids = _empty(1 << 33, dtype=torch.uint8), _empty(256)
    for token_bytes in (256, 160):
        tokens = _BLOCK // 2 // token_bytes
        layout: dict[str, Any] = {"block_bytes": _BLOCK, "page_tokens": tokens, "token_bytes": token_bytes}
        name = f"{token_bytes} bytes a token"
        yield f"copy {name}", copy_blocks.launch(memory, memory, ids, ids, ids, ids, **layout)
        yield f"copy pages {name}", copy_pages.launch(memory, _empty(1024, 8, 4), ids, ids, ids, **layout)
    out = _empty(32, 16, 8, 256)
    yield "list of parts", list_parts.launch(_empty(64, 3), _empty(17), _empty(16), 0, 64)
    yield "tables", block_tables.launch(out, _empty(1024, 32, 8), _empty(16, 256), _empty(16), 32)
    wide = _empty(256, dtype=torch.int64)
    scale = _empty(256, dtype=torch.float64)
    logits = _empty(256, 151_936, dtype=torch.float32)
    yield "draw", draw_launch.launch(wide, logits, scale, wide, scale, scale, wide)
    yield "advance", advance.launch(wide, wide, wide, ids, ids, ids, _empty(256, 64), 32)


def _weaving(dtype: torch.dtype, head_dim: int, group: int) -> Iterator[Named]:
    """Yields both ends of a loan to a model of 4 KV heads and 8 layers."""
    slots, rows, kv_heads, device = 2, 64, 4, torch.device("meta")
    heads = group * kv_heads
    mailbox = MailboxTensors(
        words=_empty(len(WORDS), LINE // 4),
        head=_empty(1, 3),
        lengths=_empty(rows),
        tables=_empty(rows, 64),
        map=_empty(1024, 8, kv_heads),
        notes=_empty(slots, NOTE.itemsize // 4),
        qkv=_empty(slots, rows, heads + 2 * kv_heads, head_dim, dtype=dtype),
        out=_empty(slots, rows, heads, head_dim, dtype=dtype),
    )
    arena = block_view(_empty(1 << 33, dtype=torch.uint8), _BLOCK, head_dim, dtype)
    name = f"{str(dtype).removeprefix('torch.')} D={head_dim} group={group}"
    lent = LentArena(_empty(mailbox.map.numel()), arena)
    yield f"serve {name}", serve.launch(mailbox, LenderState(0, mailbox), lent)
    q, k = (_empty(rows, count, head_dim, dtype=dtype) for count in (heads, kv_heads))
    borrower_state = BorrowerState(0, device)
    yield f"post {name}", post.launch(mailbox, borrower_state, q, k, k, 3, head_dim**-0.5)
    yield f"collect {name}", collect.launch(mailbox, borrower_state, q, 1000)


def served(capability: int = 90) -> Iterator[Named]:
    """Yields a launch of each kernel for each dtype and head size, and for the forms of attention, as far as
    GPUs of this compute capability have them."""
    for head_dim in (64, 80, 96, 128, 256):
        yield from _attention(torch.bfloat16, head_dim, group=4)
    yield from _attention(torch.bfloat16, 128, group=1, split=False)
    yield from _attention(torch.bfloat16, 256, group=2, window=1024, softcap=50.0)
    yield from _attention(torch.float16, 128, group=7)
    yield from _attention(torch.float32, 64, group=4)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from _around(dtype, 128)
    yield from _around(torch.bfloat16, 80)
    yield from _products(torch.bfloat16, torch.uint8, 32)
    yield from _products(torch.bfloat16, torch.uint8, 128, offsets=True)
    yield from _products(torch.bfloat16, torch.int8, 16)
    yield from _products(torch.float16, torch.uint8, 4096, offsets=True)
    yield from _products(torch.float32, torch.uint8, 64)
    if (capability // 10, capability % 10) >= FP8_CAPABILITY:
        yield from _eight_bit_floats()
    yield from _others()
    yield from _weaving(torch.bfloat16, 128, group=4)
    yield from _weaving(torch.float16, 256, group=8)
    yield from _weaving(torch.float32, 64, group=4)


def source(launch: Launch) -> ASTSource:
    """Returns what Triton would compile on this launch: integers that are 1 are constants, and that pointers
    and integers are multiples of 16 is known."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value, free = launch.arguments[parameter.name], parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            aligned = value.storage_offset() * value.itemsize % 16 == 0 and not free
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not free
        else:
            signature[parameter.name], aligned = "fp32", False
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _told(cubin: bytes, what: str) -> str:
    """Returns what cuobjdump tells of a cubin; empty without it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=False).stdout


def _usage(cubin: bytes) -> tuple[int, int] | None:
    """Returns the registers of a thread and the bytes of its stack, where they are told. Kernels have no
    other use for a stack than registers that are spilled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _told(cubin, "-res-usage"))
    return (int(found[1]), int(found[2])) if found else None


def faults(launch: Launch, compiled: Any, capability: int) -> Iterator[str]:
    """Yields what is wrong with what was compiled for a launch. Arithmetic in float32, which serves nobody
    where a half precision will do, may spill."""
    kernel, ptx, cubin = launch.kernel.__name__, compiled.asm["ptx"], compiled.asm["cubin"]
    if compiled.metadata.shared > _SHARED[capability]:
        yield f"wants {compiled.metadata.shared} bytes of shared memory, the GPU has {_SHARED[capability]}"
    wide = launch.arguments.get("PRECISION") == "ieee"
    usage = _usage(cubin)
    if usage is not None and usage[1] and not wide:
        yield f"spills registers into {usage[1]} bytes"
    if (left := _LEFT.get(kernel)) and not wide:
        groups = capability >= 90 and launch.arguments[left] >= _WARPGROUP_ROWS
        product = "wgmma.mma_async" if groups else "mma.sync"
        if product not in ptx:
            yield f"does not multiply by {product}"
    for order in _ORDERS.get(kernel, ()):
        if order not in ptx:
            yield f"has no {order}"
    if orders := _MACHINE_ORDERS.get(kernel):
        code = _told(cubin, "-sass")
        yield from (f"has no {order} in its code" for order in orders if code and not re.search(order, code))


def main(arguments: list[str]) -> int:
    capability = int(arguments[0]) if arguments else 90
    target, failed = GPUTarget("cuda", capability, 32), 0
    for name, launch in served(capability):
        if not isinstance(launch.kernel, JITFunction):
            raise SystemExit("TRITON_INTERPRET is set: unset it to compile")
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        code = source(launch)
        try:
            compiled = triton.compile(code, target=target, options=options)
        except (triton.TritonError, RuntimeError) as error:
            failed += 1
            print(f"{name}: does not compile: {error}")
            continue
        usage = _usage(compiled.asm["cubin"])
        told = f"{usage[0]:>4} registers {usage[1]:>5} B stack" if usage else ""
        print(f"{name:<58} {launch.warps:>2} warps {compiled.metadata.shared:>7} B shared {told}")
        for fault in faults(launch, compiled, capability):
            failed += 1
            print(f"{name}: {fault}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
