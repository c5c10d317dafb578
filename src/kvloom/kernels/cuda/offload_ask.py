"""The borrower's end of a mailbox on devices: a task is posted, and its output waited for (Weaver, section
4.1).

Both take what they count from the device's memory, so recordings of them can be replayed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import Launch, Launcher, power_of_two
from kvloom.kernels.cuda.poll import MASK, after, ahead, blame, is_last, look, look_here, tell, tell_here
from kvloom.kernels.cuda.tile import DTYPES
from kvloom.kernels.mailbox import BorrowerState, MailboxTensors, Trouble
from kvloom.kernels.reference import check

_PROGRAMS = 16
_CHANGING = ("posted", "done", "over", "state", "step", "layer", "window", "looks")

_POSTED, _COLLECTED, _STATUS, _COUNT = (tl.constexpr(i) for i in range(4))
_LATE = tl.constexpr(int(Trouble.LATE))
_FULL = tl.constexpr(int(Trouble.FULL))
_WRONG = tl.constexpr(int(Trouble.WRONG))


@triton.jit
def _copy(to, source, heads, head, HEADS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies one row: heads that are `head` apart in `source`, to `to` without gaps from head `heads` on."""
    at = tl.arange(0, PADDED)
    values = tl.load(source + at // HEAD_DIM * head + at % HEAD_DIM, mask=at < HEADS * HEAD_DIM)
    tl.store(to + heads * HEAD_DIM + at, values.to(to.dtype.element_ty), mask=at < HEADS * HEAD_DIM)


@triton.jit(do_not_specialize=_CHANGING)
def _post(  # type: ignore[no-untyped-def]
    posted, state, step, places, scoring, qkv, q, k, v, layer, scale, window, softcap, note_words,
    scoring_slot, qkv_slot, qkv_row, q_row, q_head, k_row, k_head, v_row, v_head,
    SLOTS: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, Q_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
):  # fmt: skip
    """A program copies every n-th row, of n programs; the last one posts."""
    count = look_here(state + _POSTED)
    rows, first = tl.load(step + 1), tl.load(step + 2)
    waiting = ahead(count, look_here(state + _COLLECTED))
    slot = (count.to(tl.int64) & MASK) % SLOTS
    if (waiting >= SLOTS) | (rows > MOST):
        blame(state + _STATUS, _FULL)
    if look_here(state + _STATUS) == 0:
        for i in range(tl.program_id(0), rows, tl.num_programs(0)):
            row, to = first.to(tl.int64) + i, qkv + slot * qkv_slot + i * qkv_row
            _copy(to, q + row * q_row, 0, q_head, HEADS, Q_PADDED, HEAD_DIM)
            _copy(to, k + row * k_row, HEADS, k_head, KV_HEADS, K_PADDED, HEAD_DIM)
            _copy(to, v + row * v_row, HEADS + KV_HEADS, v_head, KV_HEADS, K_PADDED, HEAD_DIM)
    if is_last(state + _COUNT):  # noqa: SIM102 - values of the device, which `and` cannot join
        if (look_here(state + _STATUS) == 0) & (rows > 0):
            note = places + slot * note_words
            tl.store(note, tl.load(step))
            tl.store(note + 1, layer)
            tl.store(note + 2, rows)
            tl.store(note + 3, window)
            tl.store(scoring + slot * scoring_slot, scale)
            tl.store(scoring + slot * scoring_slot + 1, softcap)
            tell_here(state + _POSTED, after(count))
            tell(posted, after(count))


@triton.jit(do_not_specialize=_CHANGING)
def _collect(  # type: ignore[no-untyped-def]
    done, over, state, step, source, out, looks, source_slot, source_row, out_row, out_head,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Each program waits, and copies every n-th row, of n programs."""
    count = look_here(state + _COLLECTED)
    posted = ahead(look_here(state + _POSTED), count)
    status, finished = look_here(state + _STATUS), count.to(tl.int64) * 0
    if (posted > 0) & (status == 0):
        finished = ahead(look(done), count)
        status = look(over)
        while (finished == 0) & (status == 0) & (looks > 0):
            looks -= 1
            finished = ahead(look(done), count)
            status = look(over)
            status = tl.where(status == 0, look_here(state + _STATUS), status)  # the host's, or the launch's
        if finished == 0:
            blame(state + _STATUS, tl.where(status == 0, _LATE, status))
        if finished > posted:
            blame(state + _STATUS, _WRONG)
    good = (finished > 0) & (finished <= posted)
    rows, first = tl.load(step + 1), tl.load(step + 2)
    slot = (count.to(tl.int64) & MASK) % SLOTS
    at = tl.arange(0, PADDED)
    valid = at < HEADS * HEAD_DIM
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = source + slot * source_slot + i * source_row
        values = tl.load(row + at, mask=valid & good, other=0.0)
        to = out + (first.to(tl.int64) + i) * out_row + at // HEAD_DIM * out_head + at % HEAD_DIM
        tl.store(to, values.to(out.dtype.element_ty), mask=valid)
    if is_last(state + _COUNT):  # noqa: SIM102 - as above
        if posted > 0:
            tell_here(state + _COLLECTED, after(count))


@Launcher
def post(
    mailbox: MailboxTensors,
    borrower_state: BorrowerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    programs: int = _PROGRAMS,
) -> Launch:
    """Posts a task, as `mailbox_reference.post` says."""
    slots, rows, heads, head_dim = mailbox.out.shape
    check("q", q, -1, heads, head_dim, dtypes=DTYPES)
    check("k", k, -1, mailbox.kv_heads, head_dim, dtypes=DTYPES)
    check("v", v, -1, mailbox.kv_heads, head_dim, dtypes=DTYPES)
    arguments: dict[str, Any] = {
        **{"posted": mailbox.word("posted"), "state": borrower_state.words, "step": borrower_state.step},
        **{"places": mailbox.places, "scoring": mailbox.scoring, "qkv": mailbox.qkv},
        **{"q": q, "k": k, "v": v, "layer": layer},
        **{"scale": float(scale), "window": window, "softcap": float(softcap)},
        **{"note_words": mailbox.notes.stride(0), "scoring_slot": mailbox.scoring.stride(0)},
        **{"qkv_slot": mailbox.qkv.stride(0), "qkv_row": mailbox.qkv.stride(1)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "k_row": k.stride(0), "k_head": k.stride(1)},
        **{"v_row": v.stride(0), "v_head": v.stride(1), "SLOTS": slots, "MOST": rows, "HEADS": heads},
        **{"KV_HEADS": mailbox.kv_heads, "HEAD_DIM": head_dim, "Q_PADDED": power_of_two(heads * head_dim)},
        **{"K_PADDED": power_of_two(mailbox.kv_heads * head_dim)},
    }
    return Launch(_post, (programs,), arguments)


@Launcher
def collect(
    mailbox: MailboxTensors, borrower_state: BorrowerState, out: Tensor, looks: int, programs: int = _PROGRAMS
) -> Launch:
    """Collects a task's output, as `mailbox_reference.collect` says."""
    slots, _, heads, head_dim = mailbox.out.shape
    check("out", out, -1, heads, head_dim, dtypes=DTYPES)
    arguments: dict[str, Any] = {
        **{"done": mailbox.word("done"), "over": mailbox.word("over")},
        **{"state": borrower_state.words, "step": borrower_state.step},
        **{"source": mailbox.out, "out": out, "looks": looks},
        **{"source_slot": mailbox.out.stride(0), "source_row": mailbox.out.stride(1)},
        **{"out_row": out.stride(0), "out_head": out.stride(1), "SLOTS": slots, "HEADS": heads},
        **{"PADDED": power_of_two(heads * head_dim), "HEAD_DIM": head_dim},
    }
    return Launch(_collect, (programs,), arguments)
