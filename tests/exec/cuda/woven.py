"""Engines on devices that weave, in this process or in one of its own; the host's memory is the devices'."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import Operations, plain_operations, triton_operations
from kvloom.kernels.mailbox import BorrowerState, LenderState, LentArena, MailboxTensors, signed
from kvloom.offload.cuda import CudaOffloadBackend
from kvloom.offload.terms import Borrow, Loan
from kvloom.serve.engine import load_unit, open_offload, open_transport
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.types.spec import EngineSpec
from tests.engines import ask, body, running_over, spec_of
from tests.exec.cuda.devices import one_lane
from tests.forks import FORKS, preload
from tests.processes import DEADLINE
from tests.transfer.device_memory import SharedMemory

LOOKS = 100_000  # half a minute: the lender answers, or is gone
preload(__name__)


@asynccontextmanager
async def weaving_on_device(
    spec: EngineSpec, operations: Operations | None = None, looks: int = LOOKS
) -> AsyncIterator[Engine]:
    """An engine that can lend and borrow; afterwards laws 1 and 4 hold."""
    executor = load_executor(spec, one_lane(), operations or twins())
    transport = CudaIpcTransport(spec.unit, executor.arena, SharedMemory())
    backend = CudaOffloadBackend(executor, transport, looks)
    async with running_over(spec, executor, transport, backend) as engine:
        yield engine


def twins() -> Operations:
    """Of the host. Who would look again and again, and keep others from their work, sleeps instead."""
    return _patient(plain_operations())


@asynccontextmanager
async def weaving_on_gpu(spec: EngineSpec) -> AsyncIterator[Engine]:
    """The same on a device, put together as a unit's process does it."""
    executor = load_unit(spec, Path(), lambda _: None)
    transport = open_transport(spec, executor.arena)
    async with running_over(spec, executor, transport, open_offload(spec, executor, transport)) as engine:
        yield engine


def gpu_spec(name: str, path: Path, max_running: int) -> EngineSpec:
    """In float32, so that the tie rule holds."""
    made = spec_of({name: path}, max_running=max_running)
    models = tuple(structs.replace(one, dtype="float32") for one in made.models)
    return structs.replace(made, device="cuda:0", models=models)


def interpreted() -> Operations:
    """With the kernels that work a mailbox in Triton's interpreter."""
    return _patient(triton_operations(), programs=2)


def _patient(made: Operations, **how: Any) -> Operations:
    """At most one of them at a time, as the interpreter wants it."""
    turn = threading.Lock()

    def serve(mailbox: MailboxTensors, lender_state: LenderState, lent: LentArena, looks: int = 0) -> None:
        posted = mailbox.word("posted")
        _wait(lambda: signed(int(posted)) != signed(int(lender_state.claim) >> 32), 5 if looks else 0)
        with turn:
            made.serve(mailbox, lender_state, lent, 0, **how)

    def post(*given: Any) -> None:
        with turn:
            made.post(*given, **how)

    def collect(mailbox: MailboxTensors, borrower_state: BorrowerState, out: Tensor, looks: int) -> None:
        done, over, (posted, collected) = (
            mailbox.word("done"),
            mailbox.word("over"),
            borrower_state.words[:2].tolist(),
        )
        if posted != collected:
            _wait(lambda: int(done) != collected or int(over) or int(borrower_state.status), looks)
        with turn:
            made.collect(mailbox, borrower_state, out, 0, **how)

    return replace(plain_operations(), serve=serve, post=post, collect=collect)


def _wait(holds: Callable[[], object], looks: int) -> None:
    while looks and not holds():
        looks -= 1
        time.sleep(0.0003)


@contextmanager
def cold_unit(path: Path, *, gpu: bool = False) -> Iterator[tuple[Callable[[Borrow], Awaitable[Loan]], Any]]:
    """One in a process of its own, which may be killed: what lends, and the process."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_start, args=(theirs, str(path), gpu))
    process.start()
    theirs.close()

    async def lend(borrow: Borrow) -> Loan:
        ours.send_bytes(msgspec.msgpack.encode(borrow))
        return msgspec.msgpack.decode(await asyncio.to_thread(ours.recv_bytes), type=Loan)

    try:
        yield lend, process
    finally:
        ours.close()
        process.join(DEADLINE)
        process.kill()
        process.join()


def _start(end: Connection, path: str, gpu: bool) -> None:
    asyncio.run(_serve(end, Path(path), gpu))


async def _serve(end: Connection, path: Path, gpu: bool) -> None:
    """Lend once, and generate meanwhile, until the caller closes its end."""
    spec = gpu_spec("cold", path, 1) if gpu else spec_of({"cold": path}, max_running=1)
    async with weaving_on_gpu(spec) if gpu else weaving_on_device(spec) as engine:
        borrow = msgspec.msgpack.decode(await asyncio.to_thread(end.recv_bytes), type=Borrow)
        end.send_bytes(msgspec.msgpack.encode(engine.lender.lend(borrow)))
        over = asyncio.create_task(asyncio.to_thread(end.recv_bytes))
        while not over.done():
            await ask(engine, body("cold", [5, 7, 9], max_tokens=32))
        with suppress(EOFError):
            await over
