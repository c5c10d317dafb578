"""How the fleet's own processes call a gateway: at its Unix socket on the same host, and over TLS with the
fleet's certificate on another one."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, TypeVar

import msgspec

from kvloom.journal.traffic import TrafficHour, decode_hours
from kvloom.types.errors import Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.service import FleetState, Pairs, Steps

ANSWER_SECONDS: Final = 10.0  # more than the gateway itself waits for a unit
HTTPS: Final = "https://"

Answer = TypeVar("Answer")


class FleetClient:
    """Satisfies `FleetControl`. The gateway that listens there by now answers. It keeps nothing between
    calls."""

    def __init__(self, where: str, *, secret: str, tls: ssl.SSLContext | None = None) -> None:
        """where: the path of a Unix socket, at which no stranger can call, so that none can be in the way; or
        `https://HOST:PORT`. tls: the context by which another host's gateway is called."""
        self._where = where
        self._tls = tls
        self._head = f"host: gateway\r\nauthorization: Bearer {secret}\r\nconnection: close\r\n"

    async def state(self) -> FleetState:
        return _read(await self._call("GET", "/admin/fleet"), FleetState)

    async def pair(self, pairs: Pairs) -> None:
        await self._call("POST", "/admin/pairs", msgspec.json.encode(pairs))

    async def scale(self, steps: Steps) -> None:
        await self._call("POST", "/admin/scale", msgspec.json.encode(steps))

    async def cards(self, unit: str) -> list[ModelCard]:
        """Returns the models that a unit serves, or has served last, as far as the gateway knows."""
        return _read(await self._call("GET", f"/admin/units/{unit}/cards"), list[ModelCard])

    async def traffic(self) -> list[TrafficHour]:
        """Returns the traffic of the gateways of its host."""
        return decode_hours(await self._call("GET", "/admin/traffic/host"))[0]

    async def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        asked = f"{method} {path} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                head, answer = await self._answered(asked)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            reason = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
            raise Unavailable(f"the gateway cannot be reached: {reason}") from error
        if not head.startswith(b"HTTP/1.1 200 "):
            raise Unavailable(f"the gateway refuses {path}: {answer[:300].decode(errors='replace')}")
        return answer

    async def _answered(self, asked: bytes) -> tuple[bytes, bytes]:
        """Returns head and body. Raises EOFError if they are not whole."""
        reader, writer = await self._connect()
        try:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            return head, await reader.readexactly(_length(head))
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._where.startswith(HTTPS):
            return await asyncio.open_unix_connection(self._where)
        host, _, port = self._where.removeprefix(HTTPS).rpartition(":")
        return await asyncio.open_connection(host, int(port), ssl=self._tls)


def _read(answer: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the gateway's answer cannot be read: {error}") from error


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    raise EOFError("an answer of unknown length")
