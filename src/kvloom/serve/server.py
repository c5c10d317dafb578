"""uvicorn's server, as gateways and engines run it."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from kvloom.serve.connection import Connection

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
LINGER_SECONDS = 1.0  # By then, whatever was sent to a server that retires has been read.


class HttpServer(uvicorn.Server):
    """A server that calls `ready` when it answers, and leaves signals to its process."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: type[Connection] = Connection,
        unix: str | None = None,
        grace: int,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                uds=unix,
                http=connection,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=grace,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
            )
        )
        self._ready = ready
        self._grace = grace
        self._retiring = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Stops accepting, lets running answers finish for up to `grace` seconds, and then ends `serve`."""
        self.config.timeout_graceful_shutdown = self._grace
        self.should_exit = True
        if self._retiring:
            asyncio.get_running_loop().call_later(self._grace, self._cut_off)

    def retire(self, seconds: float) -> None:
        """Leaves new connections to another process, and ends each open one with its next answer.

        `serve` ends once no answer is under way, or after `seconds`; no request is lost.
        """
        for server in self.servers:
            server.close()
        self._retiring = True
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = self.config.encoded_headers
        self.config.timeout_graceful_shutdown = math.ceil(seconds)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._leave)

    def _leave(self) -> None:
        self.should_exit = True

    def _cut_off(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()
