"""What tests and their peer processes say to each other: msgpack bodies behind four bytes of length."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from msgspec import Struct

from kvloom.types.address import Endpoint
from kvloom.types.errors import WireError

BLOCKS: Final = 512
BLOCK_BYTES: Final = 4096
SLOTS: Final = 64
SECRET: Final = "the fleet's"
GRANT: Final = 2.0  # seconds a NIXL sender may write unheard


class Call(Struct, array_like=True):
    number: int
    method: str
    arguments: dict[str, Any]


class Answer(Struct, array_like=True):
    number: int
    result: Any = None
    error: WireError | None = None


class Made(Struct, array_like=True):
    """A unit's process and its arena's descriptor there; −1 where it has none."""

    pid: int
    fd: int
    endpoint: Endpoint


async def read(reader: asyncio.StreamReader) -> bytes:
    """Empty at the end."""
    try:
        size = await reader.readexactly(4)
        return await reader.readexactly(int.from_bytes(size, "little"))
    except asyncio.IncompleteReadError:
        return b""
