"""The process of every rank but the first: `python -m kvloom.exec.rank FD NAME`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, Protocol

from kvloom.exec.cpu.executor import CpuWorker
from kvloom.exec.huggingface import hide_progress
from kvloom.exec.parallel.ranks import Member
from kvloom.exec.parallel.wire import StartRank, Step, Wire
from kvloom.kv.memory import keep_freed_memory
from kvloom.types.errors import ConfigError

_log = logging.getLogger(__name__)


class RankWorker(Protocol):
    """A rank's models and arena, loaded. All ranks have met since."""

    def start(self, step: Step) -> None:
        """Starts a step, in the order in which steps come. One that fails ends the process."""


Open = Callable[[StartRank, Member], RankWorker]


def open_worker(begin: StartRank, member: Member) -> RankWorker:
    """Opens the worker for the unit's device."""
    if begin.spec.device == "cpu":
        return CpuWorker.open(begin, member)
    from kvloom.exec.cuda.parallel import GpuWorker  # noqa: PLC0415  (and with it Triton)

    return GpuWorker.on_gpu(begin, member)


def serve(member: Member, open_one: Open) -> NoReturn:
    """Loads, and starts the steps that the first rank sends, until it ends."""
    begin = member.next()
    assert isinstance(begin, StartRank)
    worker = open_one(begin, member)
    keep_freed_memory()
    while True:
        step = member.next()
        assert isinstance(step, Step)
        worker.start(step)


def run_rank(open_one: Open = open_worker) -> None:
    """Runs the whole life of the process, whose first argument is the descriptor of the wire."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank says when to end
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    hide_progress()
    member = Member(Wire(socket.socket(fileno=int(sys.argv[1]))))
    try:
        serve(member, open_one)
    except ConfigError as error:
        member.refuse(error)
        os._exit(2)
    except Exception:
        logging.exception("the rank failed")
        sys.stderr.flush()
        os._exit(1)  # what is left of an exchange may hold an interpreter's own end up


if __name__ == "__main__":
    run_rank()
