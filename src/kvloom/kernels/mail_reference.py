"""Plain torch twins of the kernels that work a mailbox on devices: what they mean, program by program.

The `_steps` are one program's, and stop before each look at a word that others write, so that a caller can
have programs, lanes and both ends take their steps in any order. Without it, programs run one after the
other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.mail import MASK, Desk, End, Lent, Mail, Pad, Trouble, signed

Steps = Generator[None, None, None]
Word = Generator[None, None, int]

_UNDECIDED, _NOTHING, _TASK = range(3)


def run(programs: Iterable[Steps]) -> None:
    for steps in programs:
        for _ in steps:
            pass


def serve(mail: Mail, desk: Desk, lent: Lent, lane: int = 0, looks: int = 0, programs: int = 1) -> None:
    """Do the task that waits in a lender's mailbox, if there is one: append k and v of its rows to lent
    blocks, attend, write the output, count `done` on. Where none waits, look for `looks` times more.

    Where a task names what is not lent, or what cannot be, `over` becomes `End.FORGED` in desk and mailbox,
    and no task is taken from then on; nor while `over` is anything else, or the borrower has left. lane: of
    launches that come one after the other; those of several lanes may run at the same time.
    """
    run(serve_steps(mail, desk, lent, lane, looks, i, programs) for i in range(programs))


def post(
    mail: Mail,
    pad: Pad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Ask for attention of those rows of q [N, heads, D], k and v [N, kv_heads, D] that `pad.step` says are
    away. Where as many tasks as there are slots are not collected, or the mailbox takes fewer rows, the
    status becomes `Trouble.FULL`; while there is a status, nothing is posted."""
    run([post_steps(mail, pad, q, k, v, layer, scale, window, softcap, 0, 1)])


def collect(mail: Mail, pad: Pad, out: Tensor, looks: int) -> None:
    """Wait for the first task that is not collected, and take its output into the rows of out [N, heads, D]
    that are away. After `looks` more looks than one at `done` the status becomes `Trouble.LATE`; where the
    lender has ended the loan, its `End`. Where there is a status, those rows are 0."""
    run([collect_steps(mail, pad, out, looks, 0, 1)])


def serve_steps(
    mail: Mail, desk: Desk, lent: Lent, lane: int, looks: int, program: int, programs: int
) -> Steps:
    """One of the programs of a launch."""
    mine = desk.lanes[lane]
    decided = yield from _decide(mail, desk, mine[:1], lane + 1, looks)
    good = 1
    if decided == _TASK and not (yield from _look(desk.over)):
        good = yield from _attend(mail, int(desk.done), lent, program, programs)
    if not good:
        yield from _cas(desk.over, 0, End.FORGED)
    if (yield from _add(mine[1:2])) < programs - 1:
        return
    mine[1] = 0
    if decided == _TASK:
        why = yield from _look(desk.over)
        if why:
            yield from _set(mail.word("over"), why)
        else:
            desk.done[0] = signed(int(desk.done) + 1)
            yield from _set(mail.word("done"), int(desk.done))
    yield from _set(mine[:1], _UNDECIDED)
    yield from _cas(desk.owner, lane + 1, 0)


def _decide(mail: Mail, desk: Desk, decision: Tensor, me: int, looks: int) -> Word:
    posted = mail.word("posted")
    while True:
        waits = (yield from _look(desk.done)) != (yield from _look(posted))
        if waits or (yield from _look(decision)) or not looks:
            break
        looks -= 1
    choice = _NOTHING
    if waits and (yield from _cas(desk.owner, 0, me)) in (0, me):
        waiting = ((yield from _look(posted)) - (yield from _look(desk.done))) & MASK
        if waiting and not (yield from _look(desk.over)) and not (yield from _look(mail.word("left"))):
            choice = _TASK
            if waiting > mail.slots:
                yield from _cas(desk.over, 0, End.FORGED)
    return (yield from _cas(decision, _UNDECIDED, choice)) or choice


def _attend(mail: Mail, done: int, lent: Lent, program: int, programs: int) -> Word:
    """→ 1 where the task may be what it says."""
    slot = (done & MASK) % mail.slots
    iteration, layer, rows, window = mail.places[slot].tolist()
    if mail.head[0, :2].tolist() != [iteration, rows] or not 0 < rows <= mail.lengths.shape[0]:
        return 0
    if not 0 <= layer < mail.map.shape[1]:
        return 0
    good = 1
    for pair in range(program, rows * mail.kv_heads, programs):
        yield
        row, kv_head = divmod(pair, mail.kv_heads)
        good &= _attend_row(mail, slot, row, kv_head, layer, window, lent)
    return good


def _attend_row(mail: Mail, slot: int, row: int, kv_head: int, layer: int, window: int, lent: Lent) -> int:
    arena = lent.arena
    length, tokens = int(mail.lengths[row]), arena.shape[2]
    if not 1 <= length <= mail.tables.shape[1] * tokens:
        return 0
    edge, offset = divmod(length - 1, tokens)
    start = max(0, length - window) if window > 0 else 0
    named = [_named(mail, row, page, layer, kv_head, lent.blocks) for page in range(edge + 1)]
    own = torch.tensor([0 if block is None else block for block in named], dtype=torch.int32)
    page_map, table = own[:, None, None], torch.arange(edge + 1, dtype=torch.int32)[None]
    first = mail.heads + kv_head
    k, v = (mail.qkv[slot, row, at][None, None] for at in (first, first + mail.kv_heads))
    if named[edge] is not None:
        reference.write_kv(arena, page_map, 0, k, v, table[0, -1:], torch.tensor([offset]))
    if None in named[start // tokens :]:
        return 0
    group = mail.heads // mail.kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q, form = mail.qkv[slot, row, heads][None].to(arena.dtype), mail.scoring[slot].tolist()
    out = torch.empty_like(q, dtype=mail.out.dtype)
    lengths = torch.tensor([length], dtype=torch.int32)
    scale, softcap = form[0], max(0.0, form[1])
    reference.decode_attention(out, q, arena, page_map, 0, table, lengths, scale, max(0, window), softcap)
    mail.out[slot, row, heads] = out[0]
    return 1


def _named(mail: Mail, row: int, page: int, layer: int, kv_head: int, lent: Tensor) -> int | None:
    """The own block of a page of a row; None where it is not lent."""
    told = int(mail.tables[row, page])
    if not 0 <= told < mail.map.shape[0]:
        return None
    block = int(mail.map[told, layer, kv_head])
    return int(lent[block]) if 0 <= block < len(lent) else None


def post_steps(
    mail: Mail,
    pad: Pad,
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
    """One of the programs of a launch."""
    posted, collected = int(pad.words[0]), int(pad.words[1])
    iteration, rows, first = pad.step.tolist()
    slot = (posted & MASK) % mail.slots
    if (posted - collected) & MASK >= mail.slots or rows > mail.lengths.shape[0]:
        yield from _cas(pad.status, 0, Trouble.FULL)
    if not (yield from _look(pad.status)):
        for i in range(program, rows, programs):
            mail.qkv[slot, i] = torch.cat((q[first + i], k[first + i], v[first + i]))
    if (yield from _add(pad.words[3:])) < programs - 1:
        return
    pad.words[3] = 0
    if rows and not (yield from _look(pad.status)):
        mail.places[slot] = torch.tensor([iteration, layer, rows, window])
        mail.scoring[slot] = torch.tensor([scale, softcap]).double()  # as a kernel is given them
        pad.words[0] = signed(posted + 1)
        yield from _set(mail.word("posted"), posted + 1)


def collect_steps(mail: Mail, pad: Pad, out: Tensor, looks: int, program: int, programs: int) -> Steps:
    """One of the programs of a launch."""
    collected = int(pad.words[1])
    posted, finished = (int(pad.words[0]) - collected) & MASK, 0
    status = yield from _look(pad.status)
    if posted and not status:
        finished = ((yield from _look(mail.word("done"))) - collected) & MASK
        status = yield from _look(mail.word("over"))
        while not finished and not status and looks:
            looks -= 1
            finished = ((yield from _look(mail.word("done"))) - collected) & MASK
            status = yield from _look(mail.word("over"))
        if not finished:
            yield from _cas(pad.status, 0, status or Trouble.LATE)
        if finished > posted:
            yield from _cas(pad.status, 0, Trouble.WRONG)
    _, rows, first = pad.step.tolist()
    source = mail.out[(collected & MASK) % mail.slots]
    for i in range(program, rows, programs):
        if 0 < finished <= posted:
            out[first + i] = source[i]
        else:
            out[first + i] = 0
    if (yield from _add(pad.words[3:])) < programs - 1:
        return
    pad.words[3] = 0
    if posted:
        pad.words[1] = signed(collected + 1)


def _look(word: Tensor) -> Word:
    yield
    return int(word) & MASK


def _set(word: Tensor, value: int) -> Steps:
    yield
    word[0] = signed(value)


def _cas(word: Tensor, wanted: int, value: int) -> Word:
    """→ what was there; the value is, where that was what was wanted."""
    yield
    found = int(word) & MASK
    if found == wanted & MASK:
        word[0] = signed(value)
    return found


def _add(word: Tensor) -> Word:
    """→ what was there."""
    yield
    found = int(word)
    word[0] = found + 1
    return found
