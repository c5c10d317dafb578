"""The process of one gateway: `python -m kvloom.serve.gateway_process FD NAME`. Never imports torch.

It puts together the router with its units, and the server in front of them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import uvloop

from kvloom.api.access.audit import Audit
from kvloom.api.access.keyring import KeyFile, KeyRing
from kvloom.api.admin import Admin
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.live.samples import LiveSamples
from kvloom.api.live.totals import model_totals
from kvloom.api.metrics import Metrics
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Change, Edited, Snapshot
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.state import ALIVE, is_gateway
from kvloom.config.fields import check_collector
from kvloom.journal.file import AppendedFile
from kvloom.journal.log import Outbox, RecordLog
from kvloom.journal.records import Journaled, Recorder, nobody
from kvloom.journal.samples import Sample, make_sample
from kvloom.journal.traffic import TrafficCounts, TrafficHour
from kvloom.journal.traffic_log import TrafficKeeper, TrafficLog
from kvloom.router.client import UNIX, HttpEngineClient, UnitClient
from kvloom.router.program import Program, load_program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.serve.connections import OpenConnections
from kvloom.serve.machine import listen
from kvloom.serve.processes.gateways import FleetClient
from kvloom.serve.processes.identity import calling_context, serving_context
from kvloom.serve.processes.log import ACCESS, Background
from kvloom.serve.processes.messages import (
    ChildReport,
    GatewayOrder,
    Ready,
    RetireOrder,
    Told,
    keep_cards,
    kept_cards,
)
from kvloom.serve.processes.parent import Parent, keep_out_of_collections, run_child
from kvloom.serve.processes.pulse import PULSE, tell_pulse
from kvloom.serve.processes.texts import TextProcesses
from kvloom.serve.server import ClientConnection, HttpServer
from kvloom.serve.tls import Certificates, FixedCertificate, FleetDoor, TlsServer
from kvloom.types.clock import Clock, WallClock, together
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.request import ModelCard

GRACE_SECONDS: Final = 2  # for running streams, once told to end; half of it by themselves
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayServer:
    """Heeds its supervisor while it serves."""

    mirror: Mirror
    journal: RecordLog
    samples: LiveSamples
    server: HttpServer
    drain: float
    """Seconds for streams when another gateway takes its place."""
    ending: asyncio.Event
    """Set once it is told to end."""

    def heed(self, news: Told) -> None:
        if isinstance(news, RetireOrder):
            self._hang_up()
            self.server.retire(self.drain)
        elif isinstance(news, Snapshot | Change | Edited):
            self.mirror.heed(news)
        elif isinstance(news, Journaled):
            self.journal.take(news.records)

    def end(self) -> None:
        self.mirror.give_up()
        self._hang_up()
        self.server.end()
        self.ending.set()

    def _hang_up(self) -> None:
        """Ends the streams of those who follow the fleet, as they would hold the process up."""
        self.journal.close()
        self.samples.close()


@asynccontextmanager
async def gateway(
    order: GatewayOrder,
    program: Program,
    snapshot: Snapshot,
    report: Callable[[ChildReport], None],
    record: Recorder = nobody,
) -> AsyncIterator[GatewayServer]:
    """Puts a gateway together. snapshot: the fleet that it is to serve; report: takes reports to the
    supervisor; record: takes what the gateway decides to the journal."""
    mirror, clock, journal, metrics = Mirror(snapshot, report), WallClock(), RecordLog(), Metrics()
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(AsyncExitStack())  # closed last: those below call engines

        tls = None if order.identity is None else calling_context(order.identity)

        def client(address: str) -> HttpEngineClient:
            """Returns the client of an address: that of another host, or a socket's path on this one."""
            if address.startswith("https:"):
                return HttpEngineClient(address, secret=order.secret, tls=tls)
            return HttpEngineClient(f"{UNIX}{address}", secret=order.secret)

        connected: dict[str, UnitClient] = {}

        @cache
        def connect(unit: str) -> UnitClient:
            """Returns the unit's client, whether it has a process or not. One that went and comes again has
            the client that it had."""
            made = connected[unit] = UnitClient(partial(address_of, mirror, unit, order), client)
            clients.push_async_exit(made)
            return made

        def cut(units: Collection[str]) -> None:
            for unit in connected.keys() & set(units):
                tasks.create_task(connected[unit].cut())

        cards = KeptCards(Path(order.sockets), order.node, mirror)
        await cards.fetch(other_gateways(mirror, order, tls))
        link = FleetLink(mirror, connect, cards.of, cards.keep)
        router = await stack.enter_async_context(
            Router(link, program, clock, patience=order.patience, record=record, tell=metrics.lives.tell)
        )
        orders = FleetOrders(
            mirror, router.units, seconds=order.drain, memory=order.memory, cores=order.cores
        )
        rescheduler = await stack.enter_async_context(Rescheduler(router, clock, orders, record))
        trail = stack.enter_context(audit(order.audit_file))
        await stack.enter_async_context(traced(order, journal, metrics, clock))
        traffic = await stack.enter_async_context(
            traffic_kept(order, metrics.traffic, partial(other_gateways, mirror, order, tls), clock)
        )
        samples = LiveSamples(partial(take_sample, router, mirror, metrics))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        mirror.follow(cut)
        texts = await stack.enter_async_context(TextProcesses())
        beside: list[asyncio.Task[None]] = []
        ring: KeyRing | None = None
        if order.keys:
            file = KeyFile(Path(order.keys), Path(order.sockets, "keys.kept"))
            ring = file.open()
            changed = partial(trail.keys_changed, order.keys)
            beside.append(tasks.create_task(file.follow(ring, clock, changed)))
        app = create_app(
            router,
            keys=Keys(order.api_keys, order.admin_keys, order.secret, ring, order.share_prefixes),
            max_body=order.max_body,
            admin=Admin(router, orders, rescheduler, trail, journal, samples, metrics.lives, traffic),
            moves=lambda: rescheduler.moves,
            texts=texts,
            proxies=order.proxies,
            origins=order.allow_origins,
            certified=order.tls is not None and order.tls.client_ca is not None,
            request_seconds=order.request_timeout,
            access_log=logging.getLogger(ACCESS).info if order.access_log else None,
            metrics=metrics,
        )
        make: Callable[..., HttpServer] = HttpServer
        certificates = None if order.tls is None else Certificates(order.tls, Path(order.sockets), clock)
        fleet, endpoint = None, ""
        if order.identity is not None:
            listener = stack.enter_context(listen(order.address, 0))
            fleet = FleetDoor(listener, FixedCertificate(serving_context(order.identity)))
            endpoint = f"https://{order.address}:{listener.getsockname()[1]}"
        if certificates is not None or fleet is not None:
            make = partial(TlsServer, certificates=certificates, fleet=fleet)
        server = make(
            app,
            connection=ClientConnection,
            connections=OpenConnections(order.max_connections, order.proxies),
            grace=GRACE_SECONDS,
            ready=lambda: report(Ready(endpoint=endpoint)),
        )
        ending = asyncio.Event()
        for one in (
            end_streams(router, ending, clock),
            tell_pulse(router, clock, logging.getLogger(PULSE).info),
            samples.run(clock),
        ):
            beside.append(tasks.create_task(one))
        yield GatewayServer(mirror, journal, samples, server, order.drain, ending)
        for task in beside:
            task.cancel()


def address_of(mirror: Mirror, unit: str, order: GatewayOrder) -> str:
    """Returns the address at which a unit's process answers; an empty one if it has no process, or does not
    answer yet. One on the gateway's own node is called at its socket there."""
    process = mirror.process(unit)
    if process.phase not in ALIVE or not process.endpoint:
        return ""
    return f"{order.sockets}/{unit}.sock" if order.node and process.node == order.node else process.endpoint


async def take_sample(router: Router, mirror: Mirror, metrics: Metrics) -> Sample:
    """Returns a sample of the fleet, from what `/metrics` is made of."""
    loads = await router.loads()
    units = mirror.spec.units
    return make_sample(
        round(time.time(), 3),
        loads,
        router.services,
        model_totals(metrics),
        homes={unit: mirror.process(unit).node for unit in units},
        borrowers={
            cold: unit
            for unit, one in units.items()
            for cold in (one.engine.weave.colds if one.engine.weave else ())
        },
    )


@dataclass(frozen=True, slots=True)
class KeptCards:
    """The model cards of units, for when they have no process. Units keep those of their own host; a gateway
    keeps those of other hosts' units once it has learnt them."""

    folder: Path
    node: str
    mirror: Mirror

    def of(self, unit: str) -> Sequence[ModelCard]:
        return kept_cards(self.folder, unit)

    async def keep(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """Keeps a unit's cards, unless the unit does so itself."""
        if self.mirror.process(unit).node != self.node:
            await self._write(unit, cards)

    async def fetch(self, others: Sequence[FleetClient]) -> None:
        """Asks other gateways for the cards of units that cannot be asked themselves now."""
        status = self.mirror.status
        there = {name for name, node in status.nodes.items() if node.phase == "there"}
        silent = [
            name
            for name in self.mirror.spec.units
            if self.mirror.outlook(name) != "here" or self.mirror.process(name).node not in there
        ]
        async with asyncio.TaskGroup() as tasks:
            for unit in silent:
                if not self.of(unit):
                    tasks.create_task(self._fetch(unit, others))

    async def _fetch(self, unit: str, others: Sequence[FleetClient]) -> None:
        for other in others:
            with suppress(Unavailable):  # it is on its way out, or does not know the unit yet
                if cards := await other.cards(unit):
                    await self._write(unit, cards)
                    return

    async def _write(self, unit: str, cards: Sequence[ModelCard]) -> None:
        try:
            await asyncio.to_thread(keep_cards, self.folder, unit, cards)
        except OSError as error:
            _log.warning("%s: what it serves cannot be kept: %s", unit, error.strerror)


def other_gateways(mirror: Mirror, order: GatewayOrder, tls: ssl.SSLContext | None) -> list[FleetClient]:
    """Returns clients of the gateways of other nodes that answer. tls: None if there are no other nodes."""
    status = mirror.status
    there = {name for name, one in status.nodes.items() if one.phase == "there"} - {order.node}
    return [
        FleetClient(one.endpoint, secret=order.secret, tls=tls)
        for name, one in status.processes.items()
        if tls and is_gateway(name) and one.phase == "ready" and one.endpoint and one.node in there
    ]


@asynccontextmanager
async def traffic_kept(
    order: GatewayOrder, counts: TrafficCounts, others: Callable[[], Sequence[FleetClient]], clock: Clock
) -> AsyncIterator[TrafficKeeper]:
    """Keeps what a gateway counts in its host's log. others: returns clients of other nodes' gateways."""

    async def ask(other: FleetClient) -> list[TrafficHour]:
        try:
            return await other.traffic()
        except Unavailable as error:
            _log.warning("the traffic of another gateway is left out: %s", error.message)
            return []

    async def ask_all() -> list[TrafficHour]:
        found = await asyncio.gather(*map(ask, others()))
        return [hour for hours in found for hour in hours]

    log = TrafficLog(Path(order.traffic or Path(order.sockets, "traffic.jsonl")))
    keeper = TrafficKeeper(counts, log, ask_all)
    async with together() as tasks:
        keeping = tasks.create_task(keeper.run(clock))
        yield keeper
        keeping.cancel()
    await keeper.write()


@asynccontextmanager
async def traced(
    order: GatewayOrder, journal: RecordLog, metrics: Metrics, clock: Clock
) -> AsyncIterator[None]:
    """Sends the traces of requests to the address in the order, if there is one."""
    wanted = bool(order.otlp)
    if wanted:
        try:
            check_collector(order.otlp)
        except ValueError as error:  # on another host than the fleet's own
            _log.warning("otlp: %s; the gateway serves on without traces", error)
            wanted = False
    if not wanted:
        yield
        return
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415 -- an extra, which few have

    with tracing(order.otlp, f"gateway {order.node}".strip(), _log.warning) as traces:
        journal.follow(traces.note)
        metrics.lives.ended = traces.end
        async with together() as tasks:
            telling = tasks.create_task(traces.run(clock))
            yield
            telling.cancel()


@contextmanager
def audit(file: str) -> Iterator[Audit]:
    """Gives an audit trail that goes to the file, or to the log if no file is named."""
    if not file:
        yield Audit()
        return
    lines = Background(
        "audit", lambda lost: _log.error("%s: %d lines of the audit trail are lost", file, lost)
    )
    appended = AppendedFile(Path(file))

    def write(line: str) -> None:
        try:
            appended.append(line.encode() + b"\n")
        except OSError as error:  # The log has the line then, so that it is not lost.
            _log.error("%s: %s; its line is %s", file, error.strerror, line)

    try:
        yield Audit(lambda line: lines.post(lambda: write(line)))
    finally:
        lines.close()


async def end_streams(router: Router, ending: asyncio.Event, clock: Clock) -> None:
    """Ends the streams of callers who still wait when half of the grace is over, so that they read why."""
    await ending.wait()
    await clock.sleep(GRACE_SECONDS / 2)
    await router.abort_all()


def main(parent: Parent) -> None:
    order = parent.next_order(GatewayOrder)
    sys.path.append(order.folder)  # after all else, so that nothing there stands for another module
    configured = load_program(order.program.name, order.program.options)
    snapshot = parent.next_order(Snapshot)  # comes when the engines answer; the imports are done by then
    program = set_program(order, snapshot, configured, parent.report)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order, program, snapshot))


def set_program(
    order: GatewayOrder, snapshot: Snapshot, configured: Program, report: Callable[[ChildReport], None]
) -> Program:
    """Returns the program that was set while another gateway served, else the config's. One that cannot be
    loaded any more is forgotten."""
    given = snapshot.spec.program
    if given is None or given == order.program:
        return configured
    try:
        return load_program(given.name, given.options)
    except ConfigError as error:
        _log.warning(
            "%s; it was set while serving, and is forgotten: %s runs again, as configured",
            error.message,
            order.program.name,
        )
        report(Edit(program=order.program))
        return configured


async def serve(parent: Parent, order: GatewayOrder, program: Program, snapshot: Snapshot) -> None:
    """Answers the OpenAI API until SIGTERM, which the parent's end is too."""
    loop = asyncio.get_running_loop()
    early: list[Told] = []
    serving: GatewayServer | None = None

    def heed(news: Told) -> None:
        if serving is None:
            early.append(news)
        else:
            serving.heed(news)

    parent.watch(Path(order.sockets), lambda news: soon(loop, heed, news))
    outbox = Outbox(WallClock())
    async with (
        gateway(order, program, snapshot, parent.report, outbox.record) as made,
        together() as tasks,
    ):
        beating = tasks.create_task(parent.beat(outbox))
        serving = made
        for news in early:
            heed(news)
        loop.add_signal_handler(signal.SIGTERM, made.end)
        keep_out_of_collections()
        await made.server.serve(sockets=[socket.socket(fileno=number) for number in order.listeners])
        beating.cancel()


def soon(loop: asyncio.AbstractEventLoop, heed: Callable[[Told], None], news: Told) -> None:
    """Calls a function on the event loop, from any thread."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(heed, news)


if __name__ == "__main__":
    run_child(main)
