"""The kernels of a layer around its matrix products on a GPU: K and V are written into pages, rows are added,
normalised and rotated, and gated between a gated MLP's two products (Shazeer, 2020). One more brings a step's
inputs to the next token."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, Launcher, power_of_two
from kvloom.kernels.reference import Activation, check

_WRITE_VALUES = 2048  # of K, and of V, a program: two loads of 16 bytes a thread each


@triton.jit(do_not_specialize=CHANGING)
def _write(  # type: ignore[no-untyped-def]
    arena,
    page_map,
    k,
    v,
    slot_page,
    slot_offset,
    rows,
    layer,
    k_row,
    k_head,
    v_row,
    v_head,
    arena_block,
    map_page,
    map_layer,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS pairs of token and head."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    page = tl.load(slot_page + row, mask=row < rows, other=-1)
    offset = tl.load(slot_offset + row, mask=row < rows, other=0)
    block_at = page_map + page.to(tl.int64) * map_page + layer * map_layer + head
    block = tl.load(block_at, mask=page >= 0, other=0)
    dims = tl.arange(0, DIMS)
    valid = (page >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    to = arena + (block.to(tl.int64) * arena_block + offset * HEAD_DIM)[:, None] + dims[None, :]
    kind = arena.dtype.element_ty
    new = tl.load(k + (row * k_row + head * k_head)[:, None] + dims[None, :], mask=valid)
    tl.store(to, new.to(kind), mask=valid)
    new = tl.load(v + (row * v_row + head * v_head)[:, None] + dims[None, :], mask=valid)
    tl.store(to + PAGE_TOKENS * HEAD_DIM, new.to(kind), mask=valid)


@Launcher
def write_kv(
    arena: Tensor, page_map: Tensor, layer: int, k: Tensor, v: Tensor, slot_page: Tensor, slot_offset: Tensor
) -> Launch:
    """Stores new K and V in the pool, as `reference.write_kv` says; the lists are on the device."""
    (rows, kv_heads, head_dim), tokens = k.shape, arena.shape[2]
    check("arena", arena, -1, 2, tokens, head_dim)
    check("page_map", page_map, -1, -1, kv_heads, dtypes=(torch.int32,))
    check("k", k, rows, kv_heads, head_dim)
    check("v", v, rows, kv_heads, head_dim, dtypes=(k.dtype,))
    check("slot_page", slot_page, rows, dtypes=(torch.int32,))
    check("slot_offset", slot_offset, rows, dtypes=(torch.int32,))
    dims = power_of_two(head_dim)
    tile = max(1, _WRITE_VALUES // dims)
    arguments = {
        **{"arena": arena, "page_map": page_map, "k": k, "v": v},
        **{"slot_page": slot_page, "slot_offset": slot_offset, "rows": rows, "layer": layer},
        **{"k_row": k.stride(0), "k_head": _head_stride(k), "v_row": v.stride(0), "v_head": _head_stride(v)},
        **{"arena_block": arena.stride(0), "map_page": page_map.stride(0), "map_layer": page_map.stride(1)},
        **{"KV_HEADS": kv_heads, "PAGE_TOKENS": tokens, "HEAD_DIM": head_dim, "DIMS": dims, "ROWS": tile},
    }
    return Launch(_write, (triton.cdiv(rows * kv_heads, tile),), arguments)


def _head_stride(values: Tensor) -> int:
    """Returns how far the heads of [rows, heads, dim] are apart. The stride of one head means nothing, and
    may grow with the rows, so that Triton would compile the kernel anew where it is a multiple of 16."""
    return values.stride(1) if values.shape[1] > 1 else values.shape[2]


_GATED_VALUES = 1024  # a program
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi) / math.log(2))  # 2u in units of log 2


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    out, x, x_row, SIZE: tl.constexpr, KIND: tl.constexpr, VALUES: tl.constexpr
):
    """A program is a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    valid = at < SIZE
    gate = tl.load(x + row * x_row + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + SIZE + at, mask=valid, other=0.0).to(tl.float32)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * _SQRT_HALF))
    else:  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        doubled = _SLOPE * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp2(-doubled))
    tl.store(out + row * SIZE + at, (gate * up).to(out.dtype.element_ty), mask=valid)


def gated_launch(out: Tensor, x: Tensor, activation: Activation) -> Launch:
    """Returns how `gated` is launched for its output [n, F]."""
    rows, both = x.shape
    check("x", x, rows, -1)
    if both % 2:
        raise ValueError(f"x: want an even number of columns, gates first, got {both}")
    arguments = {
        **{"out": out, "x": x, "x_row": x.stride(0), "SIZE": both // 2},
        **{"KIND": activation, "VALUES": _GATED_VALUES},
    }
    return Launch(_gated, (rows, triton.cdiv(both // 2, _GATED_VALUES)), arguments)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Takes x [n, 2 F], gates first, and returns activation(gates) · the rest, [n, F]. gelu is Hendrycks and
    Gimpel's (2016) by erf, gelu_tanh their approximation."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    gated_launch(out, x, activation).run()
    return out


_NORM_VALUES = 2048  # a program, if rows are shorter


@triton.jit(do_not_specialize=CHANGING)
def _norm(  # type: ignore[no-untyped-def]
    out,
    x,
    residual,  # or None
    weight,
    rows,
    eps,
    offset,
    x_row,
    x_head,
    residual_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS rows; row r is head r % HEADS of token r // HEADS. With ADDS the residual is added to
    x in place first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, SIZE_PADDED)
    valid = (row < rows)[:, None] & (at < SIZE)[None, :]
    kind = out.dtype.element_ty
    x_at = x + (row // HEADS * x_row + row % HEADS * x_head)[:, None] + at[None, :]
    values = tl.load(x_at, mask=valid, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(residual + (row * residual_row)[:, None] + at[None, :], mask=valid, other=0.0)
        total = (values + added.to(tl.float32)).to(kind)
        tl.store(x_at, total, mask=valid)
        values = total.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(values * values, 1) / SIZE + eps)
    normal = values * inverse[:, None]
    scales = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)[None, :]
    normal = normal * (offset + scales) if OFFSET else normal.to(kind).to(tl.float32) * scales
    tl.store(out + (row * SIZE)[:, None] + at[None, :], normal.to(kind), mask=valid)


def norm_launch(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, residual: Tensor | None = None
) -> Launch:
    """Returns how `rms_norm`, or with a residual `add_rms_norm`, is launched for its output, of x's shape."""
    size = x.shape[-1]
    if residual is not None:
        check("residual", residual, x.shape[0], size, dtypes=(x.dtype,))
    flat = x if x.dim() == 3 else x.reshape(-1, 1, size)
    check("x", flat, -1, -1, size)
    check("weight", weight, size, dtypes=(x.dtype,))
    rows, padded = flat.shape[0] * flat.shape[1], power_of_two(size)
    tile = max(1, _NORM_VALUES // padded)
    arguments = {
        **{"out": out, "x": flat, "residual": residual, "weight": weight},
        **{"rows": rows, "eps": eps, "offset": offset},
        **{"x_row": flat.stride(0), "x_head": _head_stride(flat), "HEADS": flat.shape[1]},
        **{"residual_row": 0 if residual is None else residual.stride(0), "ADDS": residual is not None},
        **{"SIZE": size, "SIZE_PADDED": padded, "OFFSET": offset != 0, "ROWS": tile},
    }
    warps = max(4, min(16, padded // 512))
    return Launch(_norm, (triton.cdiv(rows, tile),), arguments, warps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalises x [..., H] by its root mean square and scales by offset + weight [H] (Zhang and Sennrich,
    2019); Gemma's offset is 1. x [n, heads, H] may be a part of wider rows."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_launch(out, x, weight, eps, offset).run()
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Adds residual [n, H] to x [n, H] in place, and returns the sum as `rms_norm` normalises it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_launch(out, x, weight, eps, offset, residual).run()
    return out


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, x_head, cos_low, cos_high, sin_low, sin_high, HEADS: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token in place."""
    head, at = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    valid = (head < HEADS)[:, None] & (at < HALF)[None, :]
    low_at = x + (head * x_head)[:, None] + at[None, :]
    low = tl.load(low_at, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=valid, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(low_at, (low * cos_low - high * sin_low).to(kind), mask=valid)
    tl.store(low_at + HALF, (high * cos_high + low * sin_high).to(kind), mask=valid)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    q_row,
    q_head,
    k_row,
    k_head,
    cos_row,
    sin_row,
    Q_HEADS: tl.constexpr,
    Q_PADDED: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """A program is a token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_PADDED)
    valid = at < HALF
    cos_low = tl.load(cos + row * cos_row + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + row * cos_row + HALF + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + row * sin_row + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + row * sin_row + HALF + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    _turn(q + row * q_row, q_head, cos_low, cos_high, sin_low, sin_high, Q_HEADS, Q_PADDED, HALF, HALF_PADDED)
    _turn(k + row * k_row, k_head, cos_low, cos_high, sin_low, sin_high, K_HEADS, K_PADDED, HALF, HALF_PADDED)


@Launcher
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Launch:
    """Rotates the first R dimensions of q [n, heads, D] and k [n, kv_heads, D] in place by cos, sin [n, R]; i
    pairs with R/2 + i. Both may be parts of wider rows."""
    (rows, q_heads, head_dim), (_, k_heads, _), size = q.shape, k.shape, cos.shape[-1]
    check("q", q, rows, q_heads, head_dim)
    check("k", k, rows, k_heads, head_dim)
    check("cos", cos, rows, size)
    check("sin", sin, rows, size)
    if size % 2 or size > head_dim:
        raise ValueError(f"cos, sin: want an even size up to {head_dim}, got {size}")
    arguments = {
        **{"q": q, "k": k, "cos": cos, "sin": sin, "cos_row": cos.stride(0), "sin_row": sin.stride(0)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "k_row": k.stride(0), "k_head": k.stride(1)},
        **{"Q_HEADS": q_heads, "Q_PADDED": power_of_two(q_heads)},
        **{"K_HEADS": k_heads, "K_PADDED": power_of_two(k_heads)},
        **{"HALF": size // 2, "HALF_PADDED": power_of_two(size // 2)},
    }
    return Launch(_rotate, (rows,), arguments)


_ROWS = 128  # a program


@triton.jit(do_not_specialize=CHANGING)
def _advance(  # type: ignore[no-untyped-def]
    ids,
    tokens,
    positions,
    lengths,
    slot_page,
    slot_offset,
    tables,
    rows,
    table_row,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS sequences."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    tl.store(tokens + row, tl.load(ids + row, mask=here), mask=here)
    position = tl.load(positions + row, mask=here, other=0) + 1
    tl.store(positions + row, position, mask=here)
    tl.store(lengths + row, tl.load(lengths + row, mask=here, other=0) + 1, mask=here)
    page = tl.load(tables + row.to(tl.int64) * table_row + position // PAGE_TOKENS, mask=here)
    tl.store(slot_page + row, page, mask=here)
    tl.store(slot_offset + row, (position % PAGE_TOKENS).to(tl.int32), mask=here)


@Launcher
def advance(
    ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
    tables: Tensor,
    page_tokens: int,
) -> Launch:
    """Appends the tokens that were drawn, as `reference.advance` says: ids, tokens and positions are int64,
    the others int32. Rows past those of ids, a graph's padding, stay."""
    rows = ids.shape[0]
    check("ids", ids, rows, dtypes=(torch.int64,))
    check("tables", tables, rows, -1, dtypes=(torch.int32,))
    inputs = {
        "tokens": (tokens, torch.int64),
        "positions": (positions, torch.int64),
        "lengths": (lengths, torch.int32),
        "slot_page": (slot_page, torch.int32),
        "slot_offset": (slot_offset, torch.int32),
    }
    for name, (tensor, kind) in inputs.items():
        check(name, tensor[:rows], rows, dtypes=(kind,))
    arguments = {
        **{"ids": ids, "tables": tables, "rows": rows, "table_row": tables.stride(0)},
        **{name: tensor for name, (tensor, _) in inputs.items()},
        **{"PAGE_TOKENS": page_tokens, "ROWS": _ROWS},
    }
    return Launch(_advance, (triton.cdiv(rows, _ROWS),), arguments)
