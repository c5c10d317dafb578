"""An HTTP connection that waits neither for ever nor without bound for a request's head."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """uvicorn's, which bounds neither. A head has HEAD_SECONDS to come, from its first byte on or, at first,
    from the connection's; what of it is longer than MAX_HEAD bytes is not read."""

    HEAD_SECONDS: ClassVar[float] = 20.0
    MAX_HEAD: ClassVar[int] = 64 << 10

    _head_bytes = 0
    _head_due: asyncio.TimerHandle | None = None  # while a head is on its way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        coming = self._head_due is not None and not self.transport.is_closing()
        if coming and self._head_bytes > self.MAX_HEAD:
            self._give_up(f"The request's head is larger than {self.MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_due is None:
            self._await_head()
            self._head_bytes = 1

    def on_headers_complete(self) -> None:
        self._has_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        late = f"The request's head took more than {self.HEAD_SECONDS:g} s to come."
        self._head_due = self.loop.call_later(self.HEAD_SECONDS, self._give_up, late)

    def _has_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _give_up(self, why: str) -> None:
        self._has_head()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or not self._head_bytes:  # it would be read as part of an answer, or as one to nothing
            self.transport.close()
        else:
            self.send_400_response(why)
