"""What two units' transports tell each other where they share no memory. `number` is the sender's own name
for a shipment; the network tells whom a message is from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvloom.types.transfer import Digest, Position, Ticket

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Claim(Struct, frozen=True, array_like=True, tag=True):
    """May I write tokens [begin, end)? digest: of the address, peer and prompt that I was given. metadata:
    how to reach me, as NIXL says it."""

    number: Number
    ticket: Ticket
    digest: Digest
    begin: Position
    end: Position
    metadata: bytes


class Renew(Struct, frozen=True, array_like=True, tag=True):
    """I am still at it."""

    number: Number


class Done(Struct, frozen=True, array_like=True, tag=True):
    """Everything is there; I write no more."""

    number: Number


class Quit(Struct, frozen=True, array_like=True, tag=True):
    """I write no more; nothing counts."""

    number: Number


class Granted(Struct, frozen=True, array_like=True, tag=True):
    """You may write for the agreed time from when you asked."""

    number: Number


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """You may not, or not any more; answer with Quit."""

    number: Number
    reason: str


class Delivered(Struct, frozen=True, array_like=True, tag=True):
    """And all tokens before yours have arrived too."""

    number: Number


FromSender = Claim | Renew | Done | Quit
FromReceiver = Granted | Refused | Delivered
Message = FromSender | FromReceiver
