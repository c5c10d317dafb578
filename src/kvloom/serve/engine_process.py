"""The process of one engine: `python -m kvloom.serve.engine_process FD NAME`."""

from __future__ import annotations

import asyncio
import functools
import importlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from kvloom.serve.orders import EngineOrder, Ready, StartProgress, keep_cards
from kvloom.serve.parent import Parent, end_at_once, run_child
from kvloom.serve.sandbox import Limits, Sandbox, grammar_trial

if TYPE_CHECKING:
    from kvloom.engine.engine import Engine
    from kvloom.exec.cpu.executor import TorchExecutor
    from kvloom.exec.cuda.executor import GpuExecutor
    from kvloom.kv.arena import ArenaMemory
    from kvloom.offload.cpu.backend import CpuOffloadBackend
    from kvloom.offload.cuda.backend import CudaOffloadBackend
    from kvloom.transfer.cuda_ipc import CudaIpcTransport
    from kvloom.transfer.nixl import NixlTransport
    from kvloom.transfer.shared_memory import ShmTransport
    from kvloom.types.clock import Clock
    from kvloom.types.spec import EngineSpec, WeaveSpec
    from kvloom.types.transfer import NoTransport

GRACE_SECONDS = 1
TRIALS: Final = 2  # grammars that are tried at the same time
TRIAL_LIMITS: Final = Limits(seconds=2.0, memory=512 << 20)


def main(parent: Parent) -> None:
    order = parent.order(EngineOrder)
    parent.watch(Path(order.socket).parent)
    parent.report(StartProgress("starting the engine"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order))


def preload() -> list[Callable[[], object]]:
    """Imports what any engine needs, for the fork server. Returns what may be done ahead of time besides,
    step by step."""
    from kvloom.api.verbs import create_verbs  # noqa: F401, PLC0415
    from kvloom.engine.engine import Engine  # noqa: F401, PLC0415
    from kvloom.exec.cpu.parallel import load_executor  # noqa: F401, PLC0415
    from kvloom.kernels.cpu.warm import kernels  # noqa: PLC0415
    from kvloom.offload.cpu.backend import CpuOffloadBackend  # noqa: F401, PLC0415
    from kvloom.offload.loans import Borrower  # noqa: F401, PLC0415
    from kvloom.router.client import HttpEngineClient  # noqa: F401, PLC0415
    from kvloom.serve.machine import require_hub  # noqa: F401, PLC0415
    from kvloom.serve.server import HttpServer  # noqa: F401, PLC0415
    from kvloom.transfer.shared_memory import ShmTransport  # noqa: F401, PLC0415

    used = ("torch.fx.experimental.symbolic_shapes",)  # by torch, to build modules without their weights
    imports = [functools.partial(importlib.import_module, name) for name in used]
    return [*(kernel.compile for kernel in kernels()), *imports]


async def serve(parent: Parent, order: EngineOrder) -> None:
    """Loads the models, then answers verbs until SIGTERM, which the parent's end brings too."""
    from kvloom.serve.machine import require_hub  # noqa: PLC0415

    spec = order.spec
    require_hub(spec.models)
    # torch is imported here, after the supervisor has been told, and in no other process
    from kvloom.api.verbs import create_verbs  # noqa: PLC0415
    from kvloom.engine.engine import Engine  # noqa: PLC0415
    from kvloom.exec.huggingface import hide_progress  # noqa: PLC0415
    from kvloom.serve.server import HttpServer  # noqa: PLC0415
    from kvloom.types.clock import WallClock  # noqa: PLC0415

    hide_progress()
    folder = Path(order.socket).parent
    executor = load_unit(spec, folder, lambda text: parent.report(StartProgress(text)))
    transport = open_transport(spec, executor.arena)
    clock = WallClock()
    sandbox = Sandbox("grammars", TRIALS, TRIAL_LIMITS)
    offload = open_offload(executor, transport)
    engine = Engine(executor, transport, spec, clock, offload, grammar_trial(sandbox))
    cards = await engine.models()
    keep_cards(folder, spec.unit, cards)
    chat = tuple(card.name for card in cards if card.chat_template is not None)
    server = HttpServer(
        create_verbs(engine, secret=order.secret, lend=engine.lend),
        unix=order.socket,
        grace=GRACE_SECONDS,
        ready=lambda: parent.report(Ready(chat)),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
    try:
        async with sandbox, asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            beside = [group.create_task(_end_when_lost(executor))]
            if spec.weave is not None:
                beside.append(group.create_task(_borrow(engine, spec, spec.weave, order, clock)))
            await server.serve()
            await engine.stop()
            for task in beside:
                task.cancel()
    finally:
        transport.close_all()
        executor.close()


def load_unit(spec: EngineSpec, folder: Path, progress: Callable[[str], None]) -> TorchExecutor | GpuExecutor:
    """Returns the executor on the unit's device. Raises ConfigError, and Unavailable if a rank ends
    meanwhile."""
    if spec.device != "cpu" and spec.tensor_parallel > 1:
        from kvloom.exec.cuda.parallel import load_parallel_gpu_executor  # noqa: PLC0415

        return load_parallel_gpu_executor(spec, folder, progress)
    if spec.device != "cpu":
        from kvloom.exec.cuda.loader import load_gpu_executor  # noqa: PLC0415

        return load_gpu_executor(spec, progress)
    from kvloom.exec.cpu.parallel import load_executor  # noqa: PLC0415

    return load_executor(spec, folder, progress)


async def _borrow(
    engine: Engine, spec: EngineSpec, weave: WeaveSpec, order: EngineOrder, clock: Clock
) -> None:
    """Borrows from the unit whose socket lies beside this one's."""
    from kvloom.offload.loans import LoanKeeper  # noqa: PLC0415
    from kvloom.router.client import UNIX, HttpEngineClient  # noqa: PLC0415

    socket = Path(order.socket).with_name(f"{weave.cold}.sock")
    async with HttpEngineClient(f"{UNIX}{socket}", secret=order.secret) as lender:
        await LoanKeeper(engine.borrower, spec.models[0].name, weave, lender, clock).run()


def open_offload(
    executor: TorchExecutor | GpuExecutor,
    transport: ShmTransport | NixlTransport | CudaIpcTransport | NoTransport,
) -> CpuOffloadBackend | CudaOffloadBackend | None:
    """Returns the unit's part in lending and borrowing; None if its device, its ranks or its transport have
    none."""
    from kvloom.exec.cpu.executor import TorchExecutor  # noqa: PLC0415
    from kvloom.offload.cpu.backend import CpuOffloadBackend  # noqa: PLC0415
    from kvloom.transfer.shared_memory import ShmTransport  # noqa: PLC0415

    if isinstance(executor, TorchExecutor) and isinstance(transport, ShmTransport):
        return CpuOffloadBackend(executor, transport)
    from kvloom.exec.cuda.executor import GpuExecutor  # noqa: PLC0415
    from kvloom.offload.cuda.backend import CudaOffloadBackend  # noqa: PLC0415
    from kvloom.transfer.cuda_ipc import CudaIpcTransport  # noqa: PLC0415

    if isinstance(executor, GpuExecutor) and isinstance(transport, CudaIpcTransport):
        return CudaOffloadBackend(executor, transport)
    return None


async def _end_when_lost(executor: TorchExecutor | GpuExecutor) -> None:
    """Ends the process at once when no job can run any more: its streams break, so that the router goes on
    with them."""
    end_at_once(await executor.lost())


def open_transport(
    spec: EngineSpec, arena: ArenaMemory
) -> ShmTransport | NixlTransport | CudaIpcTransport | NoTransport:
    """Returns the unit's transport for K and V, as the config chooses. Raises ConfigError."""
    from kvloom.kv.arena import Arena  # noqa: PLC0415

    if spec.tensor_parallel > 1:
        from kvloom.types.transfer import NoTransport  # noqa: PLC0415

        return NoTransport(spec.unit)
    if spec.transport == "nixl":
        from kvloom.transfer.nixl import NixlTransport  # noqa: PLC0415
        from kvloom.transfer.nixl_agent import place_of  # noqa: PLC0415

        return NixlTransport(spec.unit, arena, place_of(arena))
    if not isinstance(arena, Arena):
        from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory  # noqa: PLC0415

        return CudaIpcTransport(spec.unit, arena, CudaMemory(arena.bytes.device))
    from kvloom.transfer.shared_memory import ShmTransport  # noqa: PLC0415

    return ShmTransport(spec.unit, arena)


if __name__ == "__main__":
    run_child(main)
