"""The lender's poll: look for a task of the borrower, and do it at once (Weaver, section 4.1).

Launched after an operator, also from a recording. Programs take parts of the task, a row and a KV head, one
by one, and none more than its share: what is left, because some programs looked before the task came, the
next launch takes. So launches on several streams may run at the same time. Who does the last part tells.

Nothing that the borrower writes is believed (see `runs.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvloom.kernels.mail import WORDS, Desk, End, Lent, Mail
from kvloom.kernels.triton.launch import Launch, check, power_of_two
from kvloom.kernels.triton.poll import MASK, ahead, blame, look, look_here, tell, tell_here
from kvloom.kernels.triton.runs import cut, serve_run
from kvloom.kernels.triton.tile import DTYPES

_PROGRAMS = 32  # of a launch: a part of the multiprocessors is left to whoever else runs
_TILE_BYTES = 32 << 10  # of K and V
_CHANGING = ("posted", "done", "left", "over", "claim", "finished", "ended", "looks")

_FORGED = tl.constexpr(int(End.FORGED))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _task(claim):  # type: ignore[no-untyped-def]
    """How many tasks are done before."""
    return (claim >> 32) & MASK


@triton.jit
def _waiting(posted, claim, looks):  # type: ignore[no-untyped-def]
    """→ how many tasks wait, and the first of them. Where others of the launch have done it meanwhile, there
    is nothing to wait for."""
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
    """→ a part of the task that is this program's now; −1 where none is left."""
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
    """The task cannot be one."""
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


def serve_launch(mail: Mail, desk: Desk, lent: Lent, looks: int = 0, programs: int = _PROGRAMS) -> Launch:
    """How `serve` is launched."""
    (pages, layers, kv_heads), (slots, rows, heads, head_dim) = mail.map.shape, mail.out.shape
    tokens, dims = lent.arena.shape[2], max(16, power_of_two(head_dim))
    check("arena", lent.arena, -1, 2, tokens, head_dim, dtypes=DTYPES)
    check("lent", lent.blocks, pages * layers * kv_heads, dtypes=(torch.int32,))
    check("qkv", mail.qkv, slots, rows, heads + 2 * kv_heads, head_dim, dtypes=DTYPES)
    if heads % kv_heads or lent.arena.stride()[1:] != (tokens * head_dim, head_dim, 1):
        raise ValueError(
            f"arena: {heads} heads over {kv_heads}, strides {lent.arena.stride()}: want a multiple, and "
            "blocks that are contiguous"
        )
    exact = lent.arena.dtype == torch.float32
    words = {name: mail.word(name) for name in WORDS if name in ("posted", "done", "left", "over")}
    arguments: dict[str, Any] = words | {
        **{"claim": desk.claim, "finished": desk.finished, "ended": desk.over, "looks": looks},
        **{"counts": desk.counts, "partial": desk.sums, "scales": desk.scales, "SPAN": desk.span},
        **{"PARTS": len(desk.counts), "RUNS": desk.most(mail, tokens)},
        **{"head": mail.head, "lengths": mail.lengths, "tables": mail.tables, "mapped": mail.map},
        **{"places": mail.places, "scoring": mail.scoring, "qkv": mail.qkv, "out": mail.out},
        **{"lent": lent.blocks, "arena": lent.arena, "arena_block": lent.arena.stride(0)},
        **{"note_words": mail.notes.stride(0), "scoring_slot": mail.scoring.stride(0)},
        **{"qkv_slot": mail.qkv.stride(0), "qkv_row": mail.qkv.stride(1)},
        **{"out_slot": mail.out.stride(0), "out_row": mail.out.stride(1)},
        **{"SLOTS": slots, "MOST": rows, "WIDTH": mail.tables.shape[1], "PAGES": pages, "LAYERS": layers},
        **{"LENT": len(lent.blocks), "KV_HEADS": kv_heads, "GROUP": heads // kv_heads},
        **{"ROWS": max(16, power_of_two(heads // kv_heads)), "PAGE_TOKENS": tokens, "HEAD_DIM": head_dim},
        **{"DIMS": dims, "TILE": max(16, min(128, _TILE_BYTES // (2 * dims * lent.arena.itemsize)))},
        **{"PRECISION": "ieee" if exact else "tf32"},
    }
    return Launch(_serve, (programs,), arguments, warps=4, stages=3)


def serve(mail: Mail, desk: Desk, lent: Lent, looks: int = 0, programs: int = _PROGRAMS) -> None:
    """Do the task that waits in a lender's mailbox, if there is one: append k and v of its rows to lent
    blocks, attend, write the output, count `done` on. Where none waits, look for `looks` times more.

    Where a task names what is not lent, or what cannot be, `over` becomes `End.FORGED` in desk and mailbox,
    and no task is taken from then on; nor while `over` is anything else, or the borrower has left. Launches
    on several streams may run at the same time; a task that comes while one is at its start may be done by it
    in part, and by the next one to its end.
    """
    serve_launch(mail, desk, lent, looks, programs).run()
