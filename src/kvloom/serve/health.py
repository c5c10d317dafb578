"""Whether an engine still answers."""

from __future__ import annotations

import asyncio
from typing import Final

from kvloom.types.request import PROTOCOL

_OK: Final = b"HTTP/1.1 200"


async def answers(socket: str, secret: str) -> bool:
    """Whether the engine at the unix socket says that it is well. As long as that takes it."""
    asked = (
        f"GET /verbs/health HTTP/1.1\r\nhost: engine\r\nauthorization: Bearer {secret}\r\n"
        f"kvloom-protocol: {PROTOCOL}\r\nconnection: close\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(asked.encode())
            return await reader.readexactly(len(_OK)) == _OK
        finally:
            writer.close()
    except (OSError, EOFError):
        return False
