"""Decode attention's GB/s of K and V, from blocks scattered and in a row, against a plain sum's.

Run: python -m benchmarks.kernels [seconds a shape]. Best of many short runs, for machines are rarely quiet.
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom.kernels import cpu, reference

ARENA_BYTES = 512 << 20


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    shortest: int
    longest: int
    scattered: bool = True


SHAPES = (
    Shape(64, 12, 12, 64, 32, 96, 246),
    Shape(64, 12, 12, 64, 32, 96, 246, scattered=False),
    Shape(16, 32, 8, 128, 16, 400, 1000),
    Shape(16, 32, 8, 128, 16, 400, 1000, scattered=False),
    Shape(64, 9, 3, 64, 32, 96, 246),
    Shape(1, 12, 12, 64, 32, 2000, 2000),
    Shape(1, 32, 8, 128, 16, 2000, 2000),
)


def best(run: Callable[[int], object], seconds: float) -> float:
    """The shortest time of run(0), run(1), … in seconds."""
    shortest, turn, end = float("inf"), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run(turn)
        shortest = min(shortest, time.perf_counter() - start)
        turn += 1
    return shortest


def layers_of(shape: Shape, arena: Tensor) -> tuple[Tensor, Tensor, int]:
    """A page map of as many layers as fit, so that turns over layers find no KV in the CPU's caches."""
    row = -(-shape.longest // shape.page_tokens)
    pages = shape.batch * row
    layers = min(12, arena.shape[0] // (pages * shape.kv_heads))
    blocks = torch.randperm(arena.shape[0]) if shape.scattered else torch.arange(arena.shape[0])
    page_map = blocks[: pages * layers * shape.kv_heads].view(pages, layers, shape.kv_heads).int()
    return page_map, torch.arange(pages, dtype=torch.int32).view(shape.batch, row), layers


def measure(shape: Shape, buffer: Tensor, threads: int, seconds: float) -> str:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    block_bytes = shape.page_tokens * 2 * shape.head_dim * 4
    arena = reference.block_view(buffer, block_bytes, shape.head_dim)
    page_map, tables, layers = layers_of(shape, arena)
    lengths = torch.randint(shape.shortest, shape.longest + 1, (shape.batch,), dtype=torch.int32)
    q = torch.randn(shape.batch, shape.heads, shape.head_dim)
    out, scale = torch.empty_like(q), shape.head_dim**-0.5
    size = int(lengths.sum()) * shape.kv_heads * shape.head_dim * 8

    def attend(turn: int) -> None:
        cpu.decode_attention(out, q, arena, page_map, turn % layers, tables, lengths, scale)

    plain = buffer.view(torch.float32)
    spans = plain.numel() * 4 // size

    def read(turn: int) -> Tensor:
        return plain[turn % spans * (size // 4) :][: size // 4].sum()

    attention, streaming = best(attend, seconds), best(read, seconds)
    layout = "scattered" if shape.scattered else "in a row"
    heads = f"{shape.heads}/{shape.kv_heads}"
    name = f"B={shape.batch} heads={heads} D={shape.head_dim} T={shape.page_tokens} {layout}"
    return (
        f"{name:<44} {threads} threads: {attention * 1e6:7.0f} us, {size / attention / 1e9:5.1f} GB/s; "
        f"a sum reads {size / streaming / 1e9:5.1f}"
    )


def call_overheads(seconds: float) -> str:
    """The cheapest call of each kernel, in microseconds: one row, little to do."""
    arena = reference.block_view(torch.zeros(1 << 16, dtype=torch.uint8), 4096, 64)
    page_map = torch.arange(4, dtype=torch.int32).view(4, 1, 1)
    table, one, row = page_map.view(1, 4), torch.ones(1, dtype=torch.int32), torch.randn(1, 1, 64)
    calls: dict[str, Callable[[int], object]] = {
        "decode_attention": lambda _: cpu.decode_attention(row, row, arena, page_map, 0, table, one, 0.1),
        "write_kv": lambda _: cpu.write_kv(arena, page_map, 0, row, row, one, one),
        "rms_norm": lambda _: cpu.rms_norm(row[0], row[0, 0], 1e-6),
        "rotate": lambda _: cpu.rotate(row, row[0], row[0]),
    }
    return ", ".join(f"{name} {best(call, seconds) * 1e6:.1f}" for name, call in calls.items())


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    buffer = torch.empty(ARENA_BYTES, dtype=torch.uint8)
    buffer.view(torch.float32).normal_()
    most = torch.get_num_threads()
    for shape in SHAPES:
        for threads in sorted({1, most}):
            print(measure(shape, buffer, threads, seconds), flush=True)
    print(f"us a call with {most} threads: {call_overheads(seconds / 2)}")


if __name__ == "__main__":
    main()
