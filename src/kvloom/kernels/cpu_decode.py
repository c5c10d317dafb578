"""Decode attention over paged KV on a CPU, of tensors."""

import torch
from torch import Tensor

from kvloom.kernels.cpu_attention import AttentionArguments, attend_all, span_of


def decode_attention(
    out: Tensor,
    q: Tensor,
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    threads: int | None = None,
) -> None:
    """Attend with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D] (see block_view), q and out are float32; page_map [pages, layers, kv_heads],
    tables [B, pages of the longest] and lengths [B] are int32. A window n > 0 hides all but the last n;
    a softcap c > 0 bends scores s to c tanh(s / c). Rows of q and out may lie anywhere; out may be q itself.
    Lengths are 1 or more. Threads default to torch's number for the calling thread.
    """
    _check(out, q, arena, page_map, layer, tables, lengths)
    batch, heads, head_dim = q.shape
    _, layers, kv_heads = page_map.shape
    out_row, out_head, _ = out.stride()
    q_row, q_head, _ = q.stride()
    threads = torch.get_num_threads() if threads is None else threads
    span = span_of(batch, kv_heads, threads)
    arguments = AttentionArguments(
        0, 0, out.data_ptr(), out_row * 4, out_head * 4, q.data_ptr(), q_row * 4, q_head * 4,
        arena.data_ptr(), arena.stride(0) * 4, arena.shape[2], head_dim,
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(),
        batch, kv_heads, heads // kv_heads, window, span, -(-kv_heads // span), scale, softcap,
    )  # fmt: skip
    attend_all(arguments, threads)


def _check(
    out: Tensor, q: Tensor, arena: Tensor, page_map: Tensor, layer: int, tables: Tensor, lengths: Tensor
) -> None:
    """Raises TypeError and ValueError where they are not as `decode_attention` says."""
    batch, heads, head_dim = q.shape
    _, two, _, arena_dim = arena.shape
    _, layers, kv_heads = page_map.shape
    if not (out.dtype is q.dtype is arena.dtype is torch.float32):
        raise TypeError(f"out, q, arena: want float32, got {out.dtype}, {q.dtype}, {arena.dtype}")
    if not (tables.dtype is lengths.dtype is page_map.dtype is torch.int32):
        got = f"{tables.dtype}, {lengths.dtype}, {page_map.dtype}"
        raise TypeError(f"tables, lengths, page_map: want int32, got {got}")
    if (
        out.shape != q.shape
        or two != 2
        or arena_dim != head_dim
        or heads % kv_heads
        or not 0 <= layer < layers
    ):
        raise ValueError(
            f"out {tuple(out.shape)}, q {tuple(q.shape)}, arena {tuple(arena.shape)}, page_map "
            f"{tuple(page_map.shape)} and layer {layer} do not fit"
        )
    if len(tables) != batch or len(lengths) != batch:
        raise ValueError(f"tables, lengths: want {batch} sequences, got {len(tables)} and {len(lengths)}")
    if {out.stride(-1), q.stride(-1), tables.stride(-1)} != {1} or not page_map.is_contiguous():
        raise ValueError("out, q, tables: the last dimension must be contiguous; page_map all of it")
