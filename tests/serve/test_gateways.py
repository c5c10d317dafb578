"""Gateways of several hosts: where the fleet's own processes call them, whom they call, what they need."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvloom.api.auth import Keys
from kvloom.cluster.launcher import Snapshot
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.state import ComponentStatus, FleetSpec, FleetStatus, UnitSpec
from kvloom.config.tls import TlsFiles
from kvloom.serve.connections import OpenConnections
from kvloom.serve.gateway_process import address_of
from kvloom.serve.local import gateway_paths
from kvloom.serve.processes.gateways import FleetClient
from kvloom.serve.processes.identity import FleetIdentity, calling_context, serving_context
from kvloom.serve.processes.messages import GatewayOrder
from kvloom.serve.server import ClientConnection
from kvloom.serve.tls import FixedCertificate, FleetDoor, TlsServer
from kvloom.types.errors import Unavailable
from kvloom.types.spec import ProgramSpec
from tests.api.fleet import administered
from tests.config.configs import load
from tests.engines import spec_of

DEADLINE = 120.0


def identity(folder: Path) -> TlsFiles:
    folder.mkdir()
    return FleetIdentity.make().keep(folder)


def test_a_gateway_that_speaks_plain_http_answers_the_fleet_over_tls(tmp_path: Path) -> None:
    """Clients from one address have all the connections that there may be, and the fleet is let in. Who has
    another fleet's certificate is not."""
    own, other = identity(tmp_path / "own"), identity(tmp_path / "other")

    async def play() -> None:
        public, inside = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        ready = asyncio.Event()
        server = TlsServer(
            administered(keys=Keys(secret="fleet")).app,
            certificates=None,
            fleet=FleetDoor(inside, FixedCertificate(serving_context(own))),
            connection=ClientConnection,
            connections=OpenConnections(1, most=2),
            grace=1,
            ready=ready.set,
        )
        endpoint = f"https://127.0.0.1:{inside.getsockname()[1]}"
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([public]))
            await ready.wait()
            _, held = await asyncio.open_connection(*public.getsockname())
            reader, refused = await asyncio.open_connection(*public.getsockname())
            assert b"which is the most for one address" in await reader.read()
            client = FleetClient(endpoint, secret="fleet", tls=calling_context(own))
            assert (await client.state()).loads["unit-0"].free_blocks == 8
            for wrong in (
                FleetClient(endpoint, secret="fleet", tls=calling_context(other)),
                FleetClient(endpoint, secret="another", tls=calling_context(own)),
            ):
                with pytest.raises(Unavailable):
                    await wrong.state()
            held.close()
            refused.close()
            server.end()
        inside.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("process", "address"),
    [
        (ComponentStatus(phase="ready", node="a", endpoint="https://a:1"), "/fleet/unit-0.sock"),
        (ComponentStatus(phase="ready", node="b", endpoint="https://b:1"), "https://b:1"),
        (ComponentStatus(phase="starting", node="a"), ""),
        (ComponentStatus(phase="waiting", node="b", endpoint="https://b:1"), ""),
    ],
)
def test_an_engine_of_the_same_host_is_called_at_its_socket(process: ComponentStatus, address: str) -> None:
    order = GatewayOrder(
        secret="s",
        listeners=(),
        api_keys={},
        max_body=0,
        max_connections=1,
        program=ProgramSpec("data_parallel"),
        folder="/config",
        sockets="/fleet",
        node="a",
    )
    spec = FleetSpec(units={"unit-0": UnitSpec(engine=spec_of({}))})
    status = FleetStatus(processes={"unit-0": process})
    mirror = Mirror(Snapshot(seq=1, spec=spec, status=status), lambda _: None)
    assert address_of(mirror, "unit-0", order) == address


def test_what_each_host_with_a_gateway_needs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "keys.yaml").write_text("{}")
    (tmp_path / "mine.py").write_text("")
    said = "models: {a: ./model}\nkeys: keys.yaml\naudit_file: audit.jsonl\nprogram: mine:own\n"
    needed = {"keys": "keys.yaml", "audit_file": "", "program": "mine.py"}
    assert gateway_paths(load(tmp_path, said)) == {key: str(tmp_path / name) for key, name in needed.items()}
    assert gateway_paths(load(tmp_path, "models: {a: ./model}\nprogram: installed:own\n")) == {}
