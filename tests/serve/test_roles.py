"""What each process of a fleet is told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.serve.engines import Engines
from kvloom.serve.orders import GatewayOrder, Standing
from kvloom.serve.roles import Roles
from kvloom.serve.supervised import Role, Supervised
from kvloom.types.clock import WallClock


def test_a_gateway_is_to_stop_no_unit_that_is_stopped_already(tmp_path: Path) -> None:
    """It would stop it when it has been started again, and a gateway has taken this one's place."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {a: model}\nunits: [{models: [a], replicas: 2}]\n")
    config = load_config(file, {}, {}, Machine(cores=4, memory=3 << 30))

    def supervised(role: Role) -> Supervised:
        return Supervised(role, WallClock(), tell=lambda _: None, log=lambda *_: None)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            roles = Roles(config, listener, tmp_path)
            engines = Engines(config.engines, ["unit-1"], roles.engine, supervised)
            standing = Standing(leaving={"unit-0": None, "unit-1": 5.0})
            order = roles.gateway(lambda: standing, engines).order()
            assert isinstance(order, GatewayOrder)
            assert order.away == {"unit-0"}
            assert order.standing.leaving == {"unit-1": 5.0}

    asyncio.run(test())
