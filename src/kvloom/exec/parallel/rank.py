"""The process of a rank but the first: `python -m kvloom.exec.parallel.rank FD NAME`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol, Self

import torch

from kvloom.exec.attention import ForwardState
from kvloom.exec.huggingface import hide_progress
from kvloom.exec.loader import LoadedModel, load_models
from kvloom.exec.parallel.group import Group
from kvloom.exec.parallel.member import Member, check
from kvloom.exec.parallel.wire import Begin, Step, ToldMap, Wire, ids_of
from kvloom.kv.arena import Arena
from kvloom.types.errors import ConfigError

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """Loaded, with its arena."""

    def start(self, step: Step) -> None:
        """In the order in which steps come. One that fails ends the process."""


Open = Callable[[Begin, Member], Worker]


class CpuWorker:
    """Runs the steps that the first rank sends, and draws no tokens."""

    def __init__(self, group: Group, models: dict[str, LoadedModel], arena: Arena, slots: int) -> None:
        self._group = group
        self._models = models
        self._views = {
            name: arena.view(model.geometry.head_dim, model.dtype) for name, model in models.items()
        }
        self._maps = {name: ToldMap(model.geometry, arena.blocks) for name, model in models.items()}
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(slots)]

    @classmethod
    def open(cls, begin: Begin, member: Member) -> Self:
        spec = begin.spec
        torch.set_num_threads(begin.threads)
        member.join(begin, torch.device("cpu"))
        models = load_models(spec.models, spec.block_bytes, team=member)
        arena = Arena(spec.kv_bytes // (begin.size * spec.block_bytes), spec.block_bytes)
        return cls(member.group, models, arena, begin.slots)

    def start(self, step: Step) -> None:
        """What a step says of the page map holds for those after it."""
        plan = self._maps[step.model].plan(step)
        state = ForwardState(plan, self._views[step.model])
        self._slots[step.slot].submit(self._run, step, state).add_done_callback(check)

    def _run(self, step: Step, state: ForwardState) -> None:
        torch.set_num_threads(step.share)
        self._group.enter(step.slot)
        tokens, kept = ids_of(step)
        with torch.inference_mode():
            state.copy_pages(state.plan.copies)
            self._models[step.model].forward(tokens, kept, state)


def open_worker(begin: Begin, member: Member) -> Worker:
    """For the unit's device."""
    if begin.spec.device == "cpu":
        return CpuWorker.open(begin, member)
    from kvloom.exec.parallel.cuda import GpuWorker  # noqa: PLC0415  (and with it Triton)

    return GpuWorker.on_gpu(begin, member)


def serve(member: Member, open_one: Open) -> NoReturn:
    begin = member.next()
    assert isinstance(begin, Begin)
    worker = open_one(begin, member)
    member.meet()
    while True:
        step = member.next()
        assert isinstance(step, Step)
        worker.start(step)


def run_rank(open_one: Open = open_worker) -> None:
    """The process' whole life. Its first argument is the descriptor of the wire."""
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
