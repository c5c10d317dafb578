"""The lender's poll: it looks for a task of the borrower, and does it at once (Weaver, section 4.1).

It is launched after an operator, also from a recording. Programs take parts of the task, a row and a KV head,
one by one, and none more than its share: what is left, because some programs looked before the task came, the
next launch takes. So launches on several streams may run at the same time. The program that does the last
part says so.

Nothing that the borrower writes is believed: pages and blocks are held to what is lent before they are read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvloom.kernels.cuda.launch import Launch, Launcher, power_of_two
from kvloom.kernels.cuda.poll import MASK, ahead, blame, look, look_here, tell, tell_here
from kvloom.kernels.cuda.tile import DTYPES, LOWEST, attend_tokens
from kvloom.kernels.mailbox import WORDS, End, LenderState, LentArena, MailboxTensors
from kvloom.kernels.reference import check


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    mapped, lent, page, layer, kv_head, valid, PAGES: tl.constexpr, LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    """Returns own blocks of pages as the borrower counts them, lent ones in any case, and whether they were
    named."""
    inside = tl.minimum(tl.maximum(page, 0), PAGES - 1).to(tl.int64)
    named = tl.load(mapped + (inside * LAYERS + layer) * KV_HEADS + kv_head, mask=valid, other=0)
    block = tl.load(lent + tl.minimum(tl.maximum(named, 0), LENT - 1), mask=valid, other=0)
    return block.to(tl.int64), (page >= 0) & (page < PAGES) & (named >= 0) & (named < LENT)


@triton.jit
def cut(length, window, runs, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first token of a row that counts, the tokens of each run, and how many runs there are."""
    start = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    each = tl.cdiv(tl.cdiv(length - start, runs), SPAN) * SPAN
    return start, each, tl.cdiv(length - start, each)


@triton.jit
def _append(  # type: ignore[no-untyped-def]
    qkv, arena, table, mapped, lent, layer, position, kv_head, arena_block, PAGES: tl.constexpr,
    LAYERS: tl.constexpr, LENT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Appends K and V of one KV head. Returns whether the page was lent; if not, nothing is written."""
    dims = tl.arange(0, DIMS)
    kind = arena.dtype.element_ty
    inside = dims < HEAD_DIM
    page = look(table + position // PAGE_TOKENS)
    block, good = _block(mapped, lent, page, layer, kv_head, True, PAGES, LAYERS, KV_HEADS, LENT)
    to = arena + block * arena_block + position % PAGE_TOKENS * HEAD_DIM + dims
    new = qkv + (KV_HEADS * GROUP + kv_head) * HEAD_DIM + dims
    tl.store(to, tl.load(new, mask=inside).to(kind), mask=inside & good)
    new += KV_HEADS * HEAD_DIM
    tl.store(to + PAGE_TOKENS * HEAD_DIM, tl.load(new, mask=inside).to(kind), mask=inside & good)
    tl.debug_barrier()  # other threads read it
    return good


@triton.jit
def _together(sums, scales, first, count, ROWS: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sums and norms of `count` parts from `first` on, as if they were one's."""
    row = tl.arange(0, ROWS)
    places = row[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    total = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)
    for part in range(first, first + count):
        scale = scales + part * 2 * ROWS + row
        other = tl.load(scale + ROWS, cache_modifier=".cg")  # others wrote it, past this one's nearest cache
        top = tl.maximum(best, other)
        old, new = tl.exp2(best - top), tl.exp2(other - top)
        norm = norm * old + tl.load(scale, cache_modifier=".cg") * new
        more = tl.load(sums + part * ROWS * DIMS + places, cache_modifier=".cg")
        total = total * old[:, None] + more * new[:, None]
        best = top
    return total, norm


@triton.jit
def serve_run(  # type: ignore[no-untyped-def]
    out, qkv, arena, table, mapped, lent, counts, partial, scales, layer, length, start, each, count, run,
    pair, first_part, scale, bound, arena_block, PAGES: tl.constexpr, LAYERS: tl.constexpr,
    LENT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends with the queries of one KV head to one of its row's runs; the last appends before. Returns
    whether all pages were lent; if not, the output means nothing."""
    dims, row = tl.arange(0, DIMS), tl.arange(0, ROWS)
    kind = arena.dtype.element_ty
    inside = dims < HEAD_DIM
    kv_head = (pair % KV_HEADS).to(tl.int32)
    good = kv_head >= 0
    if run == count - 1:
        good = _append(
            qkv, arena, table, mapped, lent, layer, length - 1, kv_head, arena_block,
            PAGES, LAYERS, LENT, KV_HEADS, GROUP, PAGE_TOKENS, HEAD_DIM, DIMS,
        )  # fmt: skip

    heads = kv_head * GROUP + row
    valid = (row < GROUP)[:, None] & inside[None, :]
    places = (heads * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(qkv + places, mask=valid, other=0.0).to(kind)
    query = tl.zeros([ROWS], tl.int32) + length
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)
    wrong = tl.zeros([TILE], tl.int32)
    begin = start + run * each
    end = tl.minimum(begin + each, length)
    for first in range(begin, end, TILE):
        positions = first + tl.arange(0, TILE)
        there = positions < end
        pages = tl.load(table + positions // PAGE_TOKENS, mask=there, other=0)
        blocks, named = _block(mapped, lent, pages, layer, kv_head, there, PAGES, LAYERS, KV_HEADS, LENT)
        wrong += (there & (named == 0)).to(tl.int32)
        rows = blocks * arena_block + positions % PAGE_TOKENS * HEAD_DIM
        sums, norm, best = attend_tokens(
            sums, norm, best, q, query, positions, rows, there, arena, scale, bound, 0,
            PAGE_TOKENS, HEAD_DIM, DIMS, True, False, True, PRECISION,
        )  # fmt: skip
    good = good & (tl.sum(wrong, 0) == 0)
    whole = count == 1
    if count > 1:
        part = first_part + run
        tl.store(partial + part * ROWS * DIMS + row[:, None] * DIMS + dims[None, :], sums)
        tl.store(scales + part * 2 * ROWS + row, norm)
        tl.store(scales + part * 2 * ROWS + ROWS + row, best)
        tl.debug_barrier()
        whole = tl.atomic_add(counts + pair, 1, sem="acq_rel", scope="gpu") == count - 1
        if whole:
            tl.atomic_xchg(counts + pair, 0, sem="relaxed", scope="gpu")
            sums, norm = _together(partial, scales, first_part, count, ROWS, DIMS)
    result = sums / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=valid & good & whole)
    return good


_PROGRAMS = 32  # of a launch: a part of the multiprocessors is left to whoever else runs
_TILE_BYTES = 32 << 10  # of K and V
_CHANGING = ("posted", "done", "left", "over", "claim", "finished", "ended", "looks")

_FORGED = tl.constexpr(int(End.FORGED))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _task(claim):  # type: ignore[no-untyped-def]
    """Returns how many tasks are done before."""
    return (claim >> 32) & MASK


@triton.jit
def _waiting(posted, claim, looks):  # type: ignore[no-untyped-def]
    """Returns how many tasks wait, and the first of them. If others of the launch have done it meanwhile,
    there is nothing to wait for."""
    task = _task(look_here(claim))
    waiting = ahead(look(posted), task)
    while (waiting == 0) & (looks > 0):
        looks -= 1
        if _task(look_here(claim)) == task:
            waiting = ahead(look(posted), task)
        else:
            looks = 0
    return waiting, task


@triton.jit
def _take(claim, task, parts):  # type: ignore[no-untyped-def]
    """Returns a part of the task that is this program's now; −1 if none is left."""
    found = look_here(claim)
    part = found & MASK
    taken = found - 1
    while (_task(found) == task) & (part < parts) & (taken != found):
        taken = tl.atomic_cas(claim, found, found + 1, sem="acq_rel", scope="gpu")
        if taken != found:
            found = taken
            part = found & MASK
            taken = found - 1
    return tl.where(taken == found, part, -1)


@triton.jit
def _refuse(ended, over):  # type: ignore[no-untyped-def]
    """Ends the loan, for the task cannot be one."""
    blame(ended, _FORGED)
    tell(over, look_here(ended))


@triton.jit(do_not_specialize=_CHANGING)
def _serve(  # type: ignore[no-untyped-def]
    posted, done, left, over, claim, finished, ended, counts, partial, scales, head, lengths, tables, mapped,
    places, scoring, qkv, out, lent, arena, looks, arena_block, note_words, qkv_slot, qkv_row, out_slot,
    out_row, scoring_slot,
    SLOTS: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr, LAYERS: tl.constexpr,
    LENT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, RUNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A program takes parts of one task."""
    waiting, task = _waiting(posted, claim, looks)
    if waiting == 0:
        return
    if (look_here(ended) != 0) | (look(left) != 0):
        return
    slot = task % SLOTS
    note = places + slot * note_words
    layer, rows, window = look(note + 1), look(note + 2), look(note + 3)
    fits = (look(note) == look(head)) & (rows == look(head + 1)) & (rows > 0) & (rows <= MOST)
    fits = fits & (layer >= 0) & (layer < LAYERS) & (waiting <= SLOTS)
    if fits == 0:
        if _task(look_here(claim)) == task:  # else others have done it meanwhile, and its slot is free
            _refuse(ended, over)
        return
    scale = tl.load(scoring + slot * scoring_slot).to(tl.float32)
    cap = tl.load(scoring + slot * scoring_slot + 1).to(tl.float32)
    scale *= tl.where(cap > 0, 2 * _LOG2E / tl.where(cap > 0, cap, 1.0), _LOG2E)
    runs = tl.maximum(1, tl.minimum(PARTS // (rows * KV_HEADS), RUNS))
    parts = rows * KV_HEADS * runs
    turns = tl.cdiv(parts, tl.num_programs(0))
    while turns > 0:
        turns -= 1
        part = _take(claim, task, parts)
        if part < 0:
            turns = 0
        else:
            pair, run = part // runs, (part % runs).to(tl.int32)
            row = pair // KV_HEADS
            length = look(lengths + row)
            good = (length >= 1) & (length <= WIDTH * PAGE_TOKENS)
            if good:
                start, each, count = cut(length, window, runs, SPAN)
                if run < count:
                    good = serve_run(
                        out + slot * out_slot + row * out_row, qkv + slot * qkv_slot + row * qkv_row, arena,
                        tables + row * WIDTH, mapped, lent, counts, partial, scales, layer, length, start,
                        each, count, run, pair, pair * runs, scale, tl.where(cap > 0, cap * _LOG2E, 0.0),
                        arena_block, PAGES, LAYERS, LENT, KV_HEADS, GROUP, ROWS, TILE, PAGE_TOKENS, HEAD_DIM,
                        DIMS, PRECISION,
                    )  # fmt: skip
            if good == 0:
                _refuse(ended, over)
            tl.debug_barrier()
            last = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") == parts - 1
            if last:  # noqa: SIM102 - values of the device, which `and` cannot join
                if look_here(ended) == 0:
                    tl.atomic_xchg(finished, 0, sem="relaxed", scope="gpu")
                    number = (task + 1) & MASK
                    tell_here(claim, number << 32)
                    tell(done, number.to(tl.int32))


@Launcher
def serve(
    mailbox: MailboxTensors,
    lender_state: LenderState,
    lent: LentArena,
    looks: int = 0,
    programs: int = _PROGRAMS,
) -> Launch:
    """Does the task that waits in a lender's mailbox, if there is one, as `mailbox_reference.serve` says."""
    (pages, layers, kv_heads), (slots, rows, heads, head_dim) = mailbox.map.shape, mailbox.out.shape
    tokens, dims = lent.arena.shape[2], max(16, power_of_two(head_dim))
    check("arena", lent.arena, -1, 2, tokens, head_dim, dtypes=DTYPES)
    check("lent", lent.blocks, pages * layers * kv_heads, dtypes=(torch.int32,))
    check("qkv", mailbox.qkv, slots, rows, heads + 2 * kv_heads, head_dim, dtypes=DTYPES)
    if heads % kv_heads or lent.arena.stride()[1:] != (tokens * head_dim, head_dim, 1):
        raise ValueError(
            f"arena: {heads} heads over {kv_heads}, strides {lent.arena.stride()}: want a multiple, and "
            "blocks that are contiguous"
        )
    exact = lent.arena.dtype == torch.float32
    words = {name: mailbox.word(name) for name in WORDS if name in ("posted", "done", "left", "over")}
    arguments: dict[str, Any] = words | {
        **{"claim": lender_state.claim, "finished": lender_state.finished, "ended": lender_state.over},
        **{"counts": lender_state.counts, "partial": lender_state.sums, "scales": lender_state.scales},
        **{"looks": looks, "SPAN": lender_state.span},
        **{"PARTS": len(lender_state.counts), "RUNS": lender_state.most(mailbox, tokens)},
        **{"head": mailbox.head, "lengths": mailbox.lengths, "tables": mailbox.tables, "mapped": mailbox.map},
        **{"places": mailbox.places, "scoring": mailbox.scoring, "qkv": mailbox.qkv, "out": mailbox.out},
        **{"lent": lent.blocks, "arena": lent.arena, "arena_block": lent.arena.stride(0)},
        **{"note_words": mailbox.notes.stride(0), "scoring_slot": mailbox.scoring.stride(0)},
        **{"qkv_slot": mailbox.qkv.stride(0), "qkv_row": mailbox.qkv.stride(1)},
        **{"out_slot": mailbox.out.stride(0), "out_row": mailbox.out.stride(1)},
        **{"SLOTS": slots, "MOST": rows, "WIDTH": mailbox.tables.shape[1], "PAGES": pages, "LAYERS": layers},
        **{"LENT": len(lent.blocks), "KV_HEADS": kv_heads, "GROUP": heads // kv_heads},
        **{"ROWS": max(16, power_of_two(heads // kv_heads)), "PAGE_TOKENS": tokens, "HEAD_DIM": head_dim},
        **{"DIMS": dims, "TILE": max(16, min(128, _TILE_BYTES // (2 * dims * lent.arena.itemsize)))},
        **{"PRECISION": "ieee" if exact else "tf32"},
    }
    return Launch(_serve, (programs,), arguments, warps=4, stages=3)
