"""A unit on a device that lends: its own forwards do another unit's tasks on the way, and give the tokens
that they give without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.exec.cuda.device import GpuDevice, HostEvent, HostStream, PartitionLane
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.operations import Operations, plain_operations, triton_operations
from kvloom.kernels import mailbox_reference
from kvloom.kernels.mailbox import End
from kvloom.offload.cuda import CudaAttentionServer
from tests import interpreter
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import COMPUTE, one_lane
from tests.exec.cuda.engines import running_on_device
from tests.kernels.loaned import Loaned, Shape, scale_of

COUNT, DEADLINE = 2, 120.0
PROMPT = [5, 9, 200, 17, 3]


class _Slow(HostStream):
    """What is asked of it takes a moment, as a launch that looks again and again."""

    def mark(self) -> HostEvent:
        time.sleep(0.002)
        return HostEvent()


@contextmanager
def attending(
    loan: Loaned,
    device: GpuDevice,
    operations: Operations,
    borrower: int | None = None,
    ended: Callable[[str], None] = lambda why: None,
    stream: HostStream | None = None,
    **how: Any,
) -> Iterator[CudaAttentionServer]:
    """The lender's end of a loan; nobody waits long for its idle thread."""
    lanes, idle = device.partitions.lanes, PartitionLane(COMPUTE, stream or _Slow())
    given = loan.mailbox, loan.lent, loan.start, lanes, idle, operations.serve, device.enter
    made = CudaAttentionServer(*given, borrower or os.getpid(), ended, looks=0, **how)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["plain", "triton"])
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The second polls by the kernel, in the interpreter."""
    if request.param == "plain":
        yield plain_operations()
        return
    if not interpreter.INSTALLED or torch.cuda.is_available():
        pytest.skip("want triton, and no GPU: kernels do not run on the CPU there")
    interpreter.load()
    with interpreter.interpreting():
        yield replace(plain_operations(), serve=partial(triton_operations().serve, programs=2))


class Decoding:
    """The borrower's step: tasks for all layers, of which as many as there are slots are posted at once."""

    def __init__(self, loan: Loaned) -> None:
        self._loan = loan
        self._wanted: list[torch.Tensor] = []

    def post(self, lengths: list[int]) -> None:
        loan, scale = self._loan, scale_of(self._loan.shape)
        loan.begin(lengths)
        q, k, v = loan.rows(len(lengths))
        for layer in range(loan.shape.slots):
            mailbox_reference.post(loan.mailbox, loan.borrower_state, q, k, v, layer, scale)
            self._wanted.append(loan.wanted(layer, q, k, v, scale))

    def collect(self, looks: int = 0) -> None:
        for wanted in self._wanted:
            out = torch.empty(wanted.shape)
            mailbox_reference.collect(self._loan.mailbox, self._loan.borrower_state, out, looks)
            assert not int(self._loan.borrower_state.status)
            torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)
        self._wanted.clear()


def test_the_thread_that_looks_for_tasks_enters_its_device_first(operations: Operations) -> None:
    """On a host of several GPUs it would look on the first one, whichever the unit's is."""
    entered, looked, once = set[int](), set[bool](), threading.Event()

    class _Watched(GpuDevice):
        def enter(self) -> None:
            entered.add(threading.get_ident())

    def serve(*_: Any) -> None:
        looked.add(threading.get_ident() in entered)
        once.set()

    with attending(Loaned(Shape()), one_lane(device=_Watched), replace(operations, serve=serve)):
        assert once.wait(DEADLINE)
    assert looked == {True}


def test_tasks_are_done_on_the_way(
    tmp_path: Path, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By forwards alone: the thread is kept from it."""
    monkeypatch.setattr(CudaAttentionServer, "_rest", lambda self: time.sleep(0.01))
    path = make_checkpoint(tmp_path, "mistral", num_hidden_layers=1)
    device, loan = one_lane(), Loaned(Shape())
    decoding = Decoding(loan)

    async def serve() -> None:
        spec = spec_of({"m": path}, max_running=1)
        async with running_on_device(spec, device, operations) as (engine, executor):
            alone = (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens
            with attending(loan, device, operations) as server:
                executor.loans.lend(server)
                for step in range(2):
                    decoding.post([step + 2, 4])
                    assert (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens == alone
                    decoding.collect()
            decoding.post([4])
            done = int(loan.mailbox.word("done"))
            assert (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens == alone
            assert int(loan.mailbox.word("done")) == done
            executor.loans.lend(None)
            assert server.over is End(int(loan.mailbox.word("over"))) is End.CLOSED
            assert (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens == alone

    asyncio.run(serve())


def test_a_poll_after_each_product_and_each_attention(tmp_path: Path) -> None:
    """q, k and v are one product, gates and up another; and the head's."""
    path, device, loan, polls = make_checkpoint(tmp_path, "llama"), one_lane(), Loaned(Shape()), []
    operations = replace(plain_operations(), serve=lambda *a: polls.append(len(a)))

    async def serve() -> GpuExecutor:
        async with running_on_device(spec_of({"m": path}, max_running=1), device) as (engine, executor):
            with attending(loan, device, operations) as server:
                executor.loans.lend(server)
                await ask(engine, body("m", PROMPT, max_tokens=1))  # a prefill
                executor.loans.lend(None)
            return executor

    executor = asyncio.run(serve())
    layers = executor.geometries["m"].layers
    assert polls.count(3) == 5 * layers + 1


def test_while_no_forward_runs_the_thread_polls() -> None:
    loan, device = Loaned(Shape()), one_lane()
    decoding = Decoding(loan)
    with attending(loan, device, plain_operations()):
        decoding.post([2, 3])
        decoding.collect(looks=10_000_000)


class Ended:
    """Is told why a loan has ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._told = threading.Event()

    def __call__(self, why: str) -> None:
        self.reasons.append(why)
        self._told.set()

    def wait(self) -> None:
        assert self._told.wait(DEADLINE)


@pytest.mark.parametrize(
    ("word", "why", "reason"),
    [
        ("left", End.CLOSED, "the borrower has left"),
        ("posted", End.FORGED, "the borrower has written what cannot be"),
    ],
)
def test_what_ends_a_loan_is_told(word: str, why: End, reason: str) -> None:
    loan, ended = Loaned(Shape()), Ended()
    with attending(loan, one_lane(), plain_operations(), ended=ended) as server:
        loan.mailbox.word(word).add_(5)
        ended.wait()
    assert ended.reasons == [reason]
    assert server.over is End(int(loan.mailbox.word("over"))) is why


def test_a_borrower_that_never_opens_the_mailbox_ends_the_loan() -> None:
    loan, ended = Loaned(Shape()), Ended()
    loan.mailbox.word("waiting").zero_()
    with attending(loan, one_lane(), plain_operations(), ended=ended, comes=0.05):
        ended.wait()
    assert ended.reasons == ["the borrower has not come"]


def test_a_borrower_that_is_killed_is_noticed() -> None:
    ended, process = Ended(), subprocess.Popen(["sleep", "60"])
    with attending(Loaned(Shape()), one_lane(), plain_operations(), process.pid, ended):
        process.kill()
        ended.wait()
    process.wait()
    assert ended.reasons == ["the borrower has left"]


def broken(*_: object) -> Any:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class _Broken(HostStream):
    mark = broken


@pytest.mark.parametrize("stream", [HostStream(), _Broken()], ids=["to be asked", "altogether"])
def test_a_device_that_fails_ends_the_loan(stream: HostStream) -> None:
    ended, operations = Ended(), replace(plain_operations(), serve=broken)
    with attending(Loaned(Shape()), one_lane(), operations, ended=ended, stream=stream) as server:
        ended.wait()
    assert ended.reasons == ["this unit failed to look for tasks"]
    assert server.over is End.FAILED


def test_a_thread_that_finds_no_task_for_long_pauses_and_finds_the_next() -> None:
    loan, device = Loaned(Shape()), one_lane()
    launches: list[int] = []

    def serve(*given: Any) -> None:
        launches.append(len(launches))
        mailbox_reference.serve(*given)

    operations = replace(plain_operations(), serve=serve)
    decoding = Decoding(loan)
    with attending(loan, device, operations) as server:
        for _ in range(1000):
            if server._lively:
                server._thread.join(0.01)
        assert not server._lively
        assert len(launches) >= 64
        decoding.post([2, 3])
        decoding.collect(looks=10_000_000)
