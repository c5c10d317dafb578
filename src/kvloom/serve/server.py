"""uvicorn, as both processes run it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from kvloom.serve.connection import Connection

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """Says when it answers, and leaves signals to the process: `end` stops accepting, lets running
    answers finish for up to `grace` seconds and then ends `serve`."""

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True
