"""The process of a rank but the first: `python -m kvloom.model.parallel.rank FD NAME`."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

import msgspec
import torch
import transformers

from kvloom.core.errors import ConfigError
from kvloom.kv.arena import Arena
from kvloom.model.attention import ForwardState
from kvloom.model.loader import LoadedModel, load_models
from kvloom.model.parallel.group import Group, connect
from kvloom.model.parallel.steps import empty_map, ids_of, plan_of
from kvloom.model.parallel.wire import Begin, Go, Here, Order, Refused, Step, Wire

_log = logging.getLogger(__name__)


class Member:
    """What the first rank says comes on a thread of its own, which ends the process with the first rank."""

    group: Group

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def next(self) -> Order:
        return self._orders.get()

    def meet(self) -> None:
        self._wire.send(Here())
        order = self.next()
        assert isinstance(order, Go)

    def refuse(self, error: ConfigError) -> None:
        self._wire.send(Refused(error.message))

    def _listen(self) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(Order)
            while (message := self._wire.receive()) is not None:
                self._orders.put(decoder.decode(message))
        finally:
            os._exit(0)


class Worker:
    """Runs the steps that the first rank sends, and draws no tokens."""

    def __init__(self, group: Group, models: dict[str, LoadedModel], arena: Arena, slots: int) -> None:
        self._group = group
        self._models = models
        self._views = {
            name: arena.view(model.geometry.head_dim, model.dtype) for name, model in models.items()
        }
        self._maps = {name: empty_map(model.geometry, arena.blocks) for name, model in models.items()}
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(slots)]

    def start(self, step: Step) -> None:
        """In order of arrival: what a step says of the page map holds for those after it."""
        plan = plan_of(step, self._maps[step.model])
        state = ForwardState(plan, self._views[step.model])
        self._slots[step.slot].submit(self._run, step, state).add_done_callback(_check)

    def _run(self, step: Step, state: ForwardState) -> None:
        torch.set_num_threads(step.share)
        self._group.enter(step.slot)
        tokens, kept = ids_of(step)
        with torch.inference_mode():
            state.copy_pages(state.plan.copies)
            self._models[step.model].forward(tokens, kept, state)


def _check(ran: Future[None]) -> None:
    """The ranks are not in step any more after a failure, and the first one has to know."""
    error = ran.exception()
    if error is not None:
        _log.error("a job failed", exc_info=error)
        sys.stderr.flush()
        os._exit(1)


def serve(member: Member) -> NoReturn:
    begin = member.next()
    assert isinstance(begin, Begin)
    torch.set_num_threads(begin.threads)
    member.meet()
    member.group = connect(begin.store, begin.rank, begin.size, begin.threads, torch.device("cpu"))
    models = load_models(begin.models, begin.block_bytes, team=member)
    worker = Worker(member.group, models, Arena(begin.blocks, begin.block_bytes), begin.threads)
    member.meet()
    while True:
        step = member.next()
        assert isinstance(step, Step)
        worker.start(step)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank says when to end
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    transformers.logging.disable_progress_bar()
    member = Member(Wire(socket.socket(fileno=int(sys.argv[1]))))
    try:
        serve(member)
    except ConfigError as error:
        member.refuse(error)
    os._exit(2)


if __name__ == "__main__":
    main()
