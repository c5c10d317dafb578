"""The plain twins of the kernels that work a mailbox on devices, as programs in steps.

A program stops before each look at a word that others write, so that a caller can have programs, lanes and
both ends take their steps in any order. `serve`, `post` and `collect` run a launch to its end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from math import ceil

import torch
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.mailbox import (
    MASK,
    PARTS,
    BorrowerState,
    End,
    LenderState,
    LentArena,
    MailboxTensors,
    Trouble,
    signed,
)

Steps = Generator[None, None, None]
Word = Generator[None, None, int]


def serve_steps(
    mailbox: MailboxTensors, lender_state: LenderState, lent: LentArena, looks: int, programs: int
) -> Steps:
    """Runs one of the programs of a launch of `serve`."""
    task = yield from _look(lender_state.claim, 32)
    waiting = ((yield from _look(mailbox.word("posted"))) - task) & MASK
    while not waiting and looks and (yield from _look(lender_state.claim, 32)) == task:
        looks -= 1
        waiting = ((yield from _look(mailbox.word("posted"))) - task) & MASK
    if not waiting or (yield from _look(lender_state.over)) or (yield from _look(mailbox.word("left"))):
        return
    slot = task % mailbox.slots
    yield
    iteration, layer, rows, window = mailbox.places[slot].tolist()
    fits = mailbox.head[0, :2].tolist() == [iteration, rows] and 0 < rows <= mailbox.lengths.shape[0]
    if not fits or not 0 <= layer < mailbox.map.shape[1] or waiting > mailbox.slots:
        if (yield from _look(lender_state.claim, 32)) == task:
            yield from _refuse(mailbox, lender_state)
        return
    pairs = rows * mailbox.kv_heads
    runs = max(1, min(PARTS // pairs, lender_state.most(mailbox, lent.arena.shape[2])))
    parts = pairs * runs
    for _ in range(-(-parts // programs)):
        part = yield from _take(lender_state.claim, task, parts)
        if part < 0:
            return
        pair, run = divmod(part, runs)
        yield
        if not (yield from _attend_run(mailbox, lender_state, slot, pair, run, runs, layer, window, lent)):
            yield from _refuse(mailbox, lender_state)
        last = (yield from _add(lender_state.finished)) == parts - 1
        if last and not (yield from _look(lender_state.over)):
            lender_state.finished[0] = 0
            yield
            lender_state.claim[0] = signed(task + 1) << 32
            yield from _set(mailbox.word("done"), task + 1)


def _take(claim: Tensor, task: int, parts: int) -> Word:
    """Returns a part of the task that is this program's now; −1 if none is left."""
    yield
    found = int(claim)
    while (found >> 32) & MASK == task and found & MASK < parts:
        yield
        if int(claim) == found:
            claim[0] = found + 1
            return found & MASK
        found = int(claim)
    return -1


def _refuse(mailbox: MailboxTensors, lender_state: LenderState) -> Steps:
    """Ends the loan, for the task cannot be one."""
    yield from _cas(lender_state.over, 0, End.FORGED)
    yield from _set(mailbox.word("over"), int(lender_state.over))


def _attend_run(
    mailbox: MailboxTensors,
    lender_state: LenderState,
    slot: int,
    pair: int,
    run: int,
    runs: int,
    layer: int,
    window: int,
    lent: LentArena,
) -> Word:
    """Returns whether what the run names is lent. The program that ends the last run of a row attends for all
    of it; the last run of all appends."""
    row, kv_head = divmod(pair, mailbox.kv_heads)
    length, tokens = int(mailbox.lengths[row]), lent.arena.shape[2]
    if not 1 <= length <= mailbox.tables.shape[1] * tokens:
        return 0
    start = max(0, length - window) if window > 0 else 0
    each = ceil(ceil((length - start) / runs) / lender_state.span) * lender_state.span
    count = ceil((length - start) / each)
    if run >= count:
        return 1
    if run == count - 1 and not _append(mailbox, slot, row, kv_head, layer, length - 1, lent):
        return 0
    if count > 1:
        if (yield from _add(lender_state.counts[pair : pair + 1])) < count - 1:
            return 1
        lender_state.counts[pair] = 0
    return _attend_row(mailbox, slot, row, kv_head, layer, start, length, lent)


def _append(
    mailbox: MailboxTensors, slot: int, row: int, kv_head: int, layer: int, position: int, lent: LentArena
) -> int:
    page, offset = divmod(position, lent.arena.shape[2])
    block = _named(mailbox, row, page, layer, kv_head, lent.blocks)
    if block is None:
        return 0
    first, where = mailbox.heads + kv_head, torch.tensor([[[block]]], dtype=torch.int32)
    k, v = (mailbox.qkv[slot, row, at][None, None] for at in (first, first + mailbox.kv_heads))
    reference.write_kv(lent.arena, where, 0, k, v, torch.tensor([0]), torch.tensor([offset]))
    return 1


def _attend_row(
    mailbox: MailboxTensors,
    slot: int,
    row: int,
    kv_head: int,
    layer: int,
    start: int,
    length: int,
    lent: LentArena,
) -> int:
    """Attends over tokens from `start` on."""
    arena, tokens = lent.arena, lent.arena.shape[2]
    edge = (length - 1) // tokens
    named = [_named(mailbox, row, page, layer, kv_head, lent.blocks) for page in range(edge + 1)]
    own = torch.tensor([0 if block is None else block for block in named], dtype=torch.int32)
    page_map, table = own[:, None, None], torch.arange(edge + 1, dtype=torch.int32)[None]
    if None in named[start // tokens :]:
        return 0
    group = mailbox.heads // mailbox.kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q, form = mailbox.qkv[slot, row, heads][None].to(arena.dtype), mailbox.scoring[slot].tolist()
    out = torch.empty_like(q, dtype=mailbox.out.dtype)
    lengths = torch.tensor([length], dtype=torch.int32)
    scale, softcap, window = form[0], max(0.0, form[1]), length - start
    reference.decode_attention(out, q, arena, page_map, 0, table, lengths, scale, window, softcap)
    mailbox.out[slot, row, heads] = out[0]
    return 1


def _named(
    mailbox: MailboxTensors, row: int, page: int, layer: int, kv_head: int, lent: Tensor
) -> int | None:
    """Returns the own block of a page of a row; None if it is not lent."""
    told = int(mailbox.tables[row, page])
    if not 0 <= told < mailbox.map.shape[0]:
        return None
    block = int(mailbox.map[told, layer, kv_head])
    return int(lent[block]) if 0 <= block < len(lent) else None


def post_steps(
    mailbox: MailboxTensors,
    borrower_state: BorrowerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    program: int,
    programs: int,
) -> Steps:
    """Runs one of the programs of a launch of `post`."""
    posted, collected = int(borrower_state.words[0]), int(borrower_state.words[1])
    iteration, rows, first = borrower_state.step.tolist()
    slot = (posted & MASK) % mailbox.slots
    if (posted - collected) & MASK >= mailbox.slots or rows > mailbox.lengths.shape[0]:
        yield from _cas(borrower_state.status, 0, Trouble.FULL)
    if not (yield from _look(borrower_state.status)):
        for i in range(program, rows, programs):
            mailbox.qkv[slot, i] = torch.cat((q[first + i], k[first + i], v[first + i]))
    if (yield from _add(borrower_state.words[3:])) < programs - 1:
        return
    borrower_state.words[3] = 0
    if rows and not (yield from _look(borrower_state.status)):
        mailbox.places[slot] = torch.tensor([iteration, layer, rows, window])
        mailbox.scoring[slot] = torch.tensor([scale, softcap]).double()  # as a kernel is given them
        borrower_state.words[0] = signed(posted + 1)
        yield from _set(mailbox.word("posted"), posted + 1)


def collect_steps(
    mailbox: MailboxTensors,
    borrower_state: BorrowerState,
    out: Tensor,
    looks: int,
    program: int,
    programs: int,
) -> Steps:
    """Runs one of the programs of a launch of `collect`."""
    collected = int(borrower_state.words[1])
    posted, finished = (int(borrower_state.words[0]) - collected) & MASK, 0
    status = yield from _look(borrower_state.status)
    if posted and not status:
        finished = ((yield from _look(mailbox.word("done"))) - collected) & MASK
        status = yield from _look(mailbox.word("over"))
        while not finished and not status and looks:
            looks -= 1
            finished = ((yield from _look(mailbox.word("done"))) - collected) & MASK
            status = (yield from _look(mailbox.word("over"))) or (yield from _look(borrower_state.status))
        if not finished:
            yield from _cas(borrower_state.status, 0, status or Trouble.LATE)
        if finished > posted:
            yield from _cas(borrower_state.status, 0, Trouble.WRONG)
    _, rows, first = borrower_state.step.tolist()
    source = mailbox.out[(collected & MASK) % mailbox.slots]
    for i in range(program, rows, programs):
        if 0 < finished <= posted:
            out[first + i] = source[i]
        else:
            out[first + i] = 0
    if (yield from _add(borrower_state.words[3:])) < programs - 1:
        return
    borrower_state.words[3] = 0
    if posted:
        borrower_state.words[1] = signed(collected + 1)


def _look(word: Tensor, shift: int = 0) -> Word:
    yield
    return (int(word) >> shift) & MASK


def _set(word: Tensor, value: int) -> Steps:
    yield
    word[0] = signed(value)


def _cas(word: Tensor, wanted: int, value: int) -> Word:
    """Returns what was there, and stores the value if that was what was wanted."""
    yield
    found = int(word) & MASK
    if found == wanted & MASK:
        word[0] = signed(value)
    return found


def _add(word: Tensor) -> Word:
    """Counts on, and returns what was there."""
    yield
    found = int(word)
    word[0] = found + 1
    return found


def run(programs: Iterable[Steps]) -> None:
    for steps in programs:
        for _ in steps:
            pass


def serve(
    mailbox: MailboxTensors, lender_state: LenderState, lent: LentArena, looks: int = 0, programs: int = 1
) -> None:
    """Does the task that waits in a lender's mailbox, if there is one: k and v of its rows are appended to
    lent blocks, the output is written, `done` counts on. If none waits, looks for `looks` times more.

    If a task names what is not lent, or what cannot be, `over` becomes `End.FORGED` in the lender's state and
    the mailbox, and no task is taken from then on; nor while `over` is anything else, or the borrower has
    left. Launches on several streams may run at the same time; a task that comes while one is at its start
    may be done by it in part, and by the next one to its end.
    """
    run(serve_steps(mailbox, lender_state, lent, looks, programs) for _ in range(programs))


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
) -> None:
    """Asks for attention of those rows of q [N, heads, D], k and v [N, kv_heads, D] that
    `borrower_state.step` names as offloaded. If as many tasks as there are slots are not collected, or the
    mailbox takes fewer rows, the status becomes `Trouble.FULL`; while there is a status, nothing is
    posted."""
    run([post_steps(mailbox, borrower_state, q, k, v, layer, scale, window, softcap, 0, 1)])


def collect(mailbox: MailboxTensors, borrower_state: BorrowerState, out: Tensor, looks: int) -> None:
    """Waits for the first task that is not collected, and takes its output into the offloaded rows of out [N,
    heads, D]. After `looks` more looks than one at `done` the status becomes `Trouble.LATE`; if the lender
    has ended the loan, its `End`. The host may set one meanwhile, and nobody waits any longer. If there is a
    status, those rows are 0."""
    run([collect_steps(mailbox, borrower_state, out, looks, 0, 1)])
