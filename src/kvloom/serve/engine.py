"""An engine, put together: the executor on its device, its transport, its part in lending, and the server
before it all."""

from __future__ import annotations

import asyncio
import functools
import importlib
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Final, Protocol

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from starlette.types import ASGIApp

from kvloom.api.verbs import create_verbs
from kvloom.engine.engine import Engine
from kvloom.engine.freeness import freeness
from kvloom.exec.cpu.executor import TorchExecutor, load_executor
from kvloom.exec.huggingface import hide_progress
from kvloom.exec.loader import check_model
from kvloom.journal.log import Outbox
from kvloom.kernels.cpu.warm import is_warm, kernels, warm
from kvloom.kv.arena import Arena, ArenaMemory
from kvloom.kv.memory import keep_freed_memory
from kvloom.offload.cpu.attention import CpuOffloadBackend
from kvloom.offload.loan_manager import LoanManager
from kvloom.offload.terms import TAKE_BACK, OffloadBackend
from kvloom.serve.machine import listen, listen_inside
from kvloom.serve.processes.identity import serving_context
from kvloom.serve.processes.lease import HeldLease
from kvloom.serve.processes.messages import EngineOrder, Ready, StartProgress, keep_cards
from kvloom.serve.processes.parent import Parent, end_at_once, keep_out_of_collections
from kvloom.serve.processes.sandbox import Limits, Sandbox, grammar_trial
from kvloom.serve.server import HttpServer
from kvloom.serve.tls import FixedCertificate, TlsServer
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import ConfigError
from kvloom.types.job import Executor
from kvloom.types.prefix_store import PrefixStore
from kvloom.types.request import route_of
from kvloom.types.spec import EngineSpec, ModelSpec, WeaveSpec
from kvloom.types.transfer import NoTransport, Transport

GRACE_SECONDS: Final = 1
TOLD_SECONDS: Final = 0.3  # for callers to hear that the engine ends; well below the margin of a lease
CONFIG: Final = "config.json"
HUB_SECONDS: Final = 5.0
TRIALS: Final = 2  # grammars that are tried at the same time
TRIAL_LIMITS: Final = Limits(seconds=2.0, memory=64 << 20)  # a unit keeps `guide.KEPT` grammars compiled


class UnitExecutor(Executor, Protocol):
    """The executor of a unit, on whichever device."""

    @property
    def arena(self) -> ArenaMemory: ...

    async def lost(self) -> str:
        """Waits until no job can run any more, and returns why."""

    def close(self) -> None: ...


def ahead() -> list[Callable[[], object]]:
    """Returns the steps that a fork server may do ahead of time for engines, one by one, once it has imported
    this module."""
    client = functools.partial(importlib.import_module, "kvloom.router.client")  # for units that borrow
    return [*(kernel.compile for kernel in kernels()), client]


async def serve(parent: Parent, order: EngineOrder, lease: HeldLease | None = None) -> None:
    """Loads the models, then answers verbs until SIGTERM, which also comes when the parent ends, or until the
    lease is over, if there is one."""
    spec = order.spec
    require_hub(spec.models)
    hide_progress()
    folder = Path(order.socket).parent
    executor = load_unit(spec, folder, lambda text: parent.report(StartProgress(text)))
    transport = open_transport(spec, executor.arena, order.secret)
    clock = WallClock()
    sandbox = Sandbox("grammars", TRIALS, TRIAL_LIMITS)
    offload = open_offload(spec, executor, transport)
    store = open_store(spec, executor)
    outbox = Outbox(clock)
    trial, record = grammar_trial(sandbox), outbox.record
    engine = Engine(executor, transport, spec, clock, offload, trial, store, check_files, record)
    cards = await engine.models()
    keep_cards(folder, spec.unit, cards)
    routes = {card.name: route_of(card) for card in cards}
    verbs = create_verbs(
        engine, secret=order.secret, lend=engine.lend, take_back=functools.partial(TAKE_BACK.ask, engine)
    )
    with ExitStack() as sockets:
        server, listeners = make_server(
            order, verbs, lambda endpoint: parent.report(Ready(routes, endpoint)), sockets
        )
        try:
            async with sandbox, asyncio.TaskGroup() as group:
                end = functools.partial(_end, engine, server)
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
                group.create_task(engine.run())
                beside = [group.create_task(parent.beat(outbox)), group.create_task(_end_when_lost(executor))]
                if lease is not None:
                    beside.append(group.create_task(_end_when_over(lease, engine)))
                if spec.weave is not None:
                    beside.append(group.create_task(_borrow(engine, spec, spec.weave, order, clock)))
                keep_out_of_collections()
                keep_freed_memory()
                await server.serve(listeners)
                for task in beside:
                    task.cancel()
        finally:
            if store is not None:
                store.close()
            transport.close_all()
            executor.close()


def make_server(
    order: EngineOrder, app: ASGIApp, ready: Callable[[str], None], sockets: ExitStack
) -> tuple[HttpServer, list[socket.socket] | None]:
    """Returns the server of an engine's verbs, and the sockets at which it is to listen; None if it makes its
    own. ready: called with the address for other hosts, which is empty if there are none; sockets: closes
    them. Raises ConfigError if the host's address cannot be listened at."""
    if order.identity is None:
        return HttpServer(app, unix=order.socket, grace=GRACE_SECONDS, ready=lambda: ready("")), None
    path = Path(order.socket)
    path.unlink(missing_ok=True)  # that of a process that was killed
    inside = sockets.enter_context(listen_inside(path))
    outside = sockets.enter_context(listen(order.host, 0))
    endpoint = f"https://{order.host}:{outside.getsockname()[1]}"
    certificates = FixedCertificate(serving_context(order.identity))
    server = TlsServer(app, certificates=certificates, grace=GRACE_SECONDS, ready=lambda: ready(endpoint))
    return server, [inside, outside]


def require_hub(models: Iterable[ModelSpec]) -> None:
    """Raises ConfigError for a model that is neither here nor in the hub's cache, if the hub cannot be
    reached. The loaders would find that out too, after half a minute of asking again; what the hub answers is
    left to them."""
    for model in models:
        if Path(model.path).exists():
            continue
        try:
            known = isinstance(try_to_load_from_cache(model.path, CONFIG, revision=model.revision), str)
        except ValueError as error:  # It is no id of the hub, and was meant to be a folder.
            raise ConfigError(
                f"models.{model.name}: {model.path}: there is no such folder; a checkpoint's folder, or an "
                "id of the hub, is right"
            ) from error
        if known:
            continue
        try:
            url = hf_hub_url(model.path, CONFIG, revision=model.revision)
            get_hf_file_metadata(url, timeout=HUB_SECONDS)
        except HfHubHTTPError:
            continue  # it answers
        except Exception as error:  # whatever its HTTP client makes of a network
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"models.{model.name}: {model.path}: is no folder here, and the hub at {constants.ENDPOINT} "
                f"cannot be reached ({reason}); a network, or the path of a checkpoint directory, is right"
            ) from error


def check_files(model: ModelSpec) -> None:
    """Raises ConfigError for a model whose files cannot be served."""
    require_hub([model])
    check_model(model)


def load_unit(spec: EngineSpec, folder: Path, progress: Callable[[str], None]) -> UnitExecutor:
    """Returns the executor on the unit's device. Raises ConfigError, and Unavailable if a rank ends
    meanwhile."""
    if spec.device != "cpu" and spec.tensor_parallel > 1:
        from kvloom.exec.cuda.parallel import load_parallel_gpu_executor  # noqa: PLC0415

        return load_parallel_gpu_executor(spec, folder, progress)
    if spec.device != "cpu":
        from kvloom.exec.cuda.loader import load_gpu_executor  # noqa: PLC0415

        return load_gpu_executor(spec, progress)
    if not is_warm():
        warm(lambda at, whole: progress(f"compiling kernels, once on this machine ({at}/{whole})"))
    return load_executor(spec, folder, progress)


async def _borrow(
    engine: Engine, spec: EngineSpec, weave: WeaveSpec, order: EngineOrder, clock: Clock
) -> None:
    """Borrows from units whose sockets lie beside this one's."""
    from kvloom.router.client import UNIX, HttpEngineClient  # noqa: PLC0415 -- few units borrow

    async with AsyncExitStack() as clients:
        lenders = {
            cold: await clients.enter_async_context(
                HttpEngineClient(f"{UNIX}{Path(order.socket).with_name(f'{cold}.sock')}", secret=order.secret)
            )
            for cold in weave.colds
        }
        model = spec.models[0].name
        await LoanManager(engine.borrower, model, weave, lenders, clock, freeness).run()


def open_offload(spec: EngineSpec, executor: UnitExecutor, transport: Transport) -> OffloadBackend | None:
    """Returns the unit's part in lending and borrowing; None if a unit of its kind has none."""
    if not spec.abilities.weaves:
        return None
    if isinstance(executor, TorchExecutor):
        return CpuOffloadBackend(executor, transport) if isinstance(transport, ShmTransport) else None
    from kvloom.exec.cuda.executor import GpuExecutor  # noqa: PLC0415
    from kvloom.offload.cuda import CudaOffloadBackend  # noqa: PLC0415
    from kvloom.transfer.cuda_ipc import CudaIpcTransport  # noqa: PLC0415

    if isinstance(executor, GpuExecutor) and isinstance(transport, CudaIpcTransport):
        return CudaOffloadBackend(executor, transport)
    return None


async def _end_when_lost(executor: UnitExecutor) -> None:
    """Ends the process at once when no job can run any more: its streams break, so that the router goes on
    with them."""
    end_at_once(await executor.lost())


def _end(engine: Engine, server: HttpServer) -> None:
    """Ends the process. Callers hear first that the engine stops: if their streams just broke, they would
    count it among the engines that a request has ended."""
    engine.stop()
    server.end()


async def _end_when_over(lease: HeldLease, engine: Engine) -> None:
    """Ends the process when it may not serve any more. Callers that can be reached hear that first."""
    await lease.over()
    engine.stop()
    await asyncio.sleep(TOLD_SECONDS)
    end_at_once("this host's lease is over: the fleet's controller cannot be reached")


def open_store(spec: EngineSpec, executor: UnitExecutor) -> PrefixStore | None:
    """Returns the store of the unit's prefixes; None if it is to have none, or a unit of its kind keeps
    none."""
    if spec.cache_dir is None or not isinstance(executor, TorchExecutor):
        return None
    from kvloom.transfer.disk.store import open_disk_store  # noqa: PLC0415 -- few units have one

    return open_disk_store(spec, executor.arena, executor.geometries, executor.identities, executor.blocks)


def open_transport(spec: EngineSpec, arena: ArenaMemory, secret: str = "") -> Transport:
    """Returns the unit's transport for K and V, as the config chooses. secret: the fleet's, which peers over
    TCP prove that they know. Raises ConfigError."""
    if not spec.abilities.moves:
        return NoTransport(spec.unit)
    if spec.transport != "shm":
        from kvloom.transfer.paths import open_paths  # noqa: PLC0415

        return open_paths(spec.unit, spec.transport, arena, secret, spec.transport_host)
    if not isinstance(arena, Arena):
        from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory  # noqa: PLC0415

        return CudaIpcTransport(spec.unit, arena, CudaMemory(arena.bytes.device))
    return ShmTransport(spec.unit, arena)
