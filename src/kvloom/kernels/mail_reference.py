"""Plain torch twins of the kernels that work a mailbox on devices: what they mean.

A launch's programs (`mail_programs.py`) run one after the other here."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kvloom.kernels.mail import Desk, Lent, Mail, Pad
from kvloom.kernels.mail_programs import Steps, collect_steps, post_steps, serve_steps


def run(programs: Iterable[Steps]) -> None:
    for steps in programs:
        for _ in steps:
            pass


def serve(mail: Mail, desk: Desk, lent: Lent, looks: int = 0, programs: int = 1) -> None:
    """Do the task that waits in a lender's mailbox, if there is one: append k and v of its rows to lent
    blocks, attend, write the output, count `done` on. Where none waits, look for `looks` times more.

    Where a task names what is not lent, or what cannot be, `over` becomes `End.FORGED` in desk and mailbox,
    and no task is taken from then on; nor while `over` is anything else, or the borrower has left. Launches
    on several streams may run at the same time; a task that comes while one is at its start may be done by it
    in part, and by the next one to its end.
    """
    run(serve_steps(mail, desk, lent, looks, programs) for _ in range(programs))


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
    lender has ended the loan, its `End`. The host may set one meanwhile, and nobody waits any longer. Where
    there is a status, those rows are 0."""
    run([collect_steps(mail, pad, out, looks, 0, 1)])
