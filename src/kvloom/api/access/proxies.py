"""Callers behind proxies: reads the caller's address from the `X-Forwarded-For` of known proxies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PROXIED: Final = "kvloom.proxied"
"""The scope's key that is true if a proxy has brought the request, whatever it says of whom."""
UNKNOWN: Final = "unknown"
"""The caller's address if a proxy does not say it in a form that can be read."""
MOST_HOPS: Final = 32
NETWORK_BITS: Final = 64

_HOP: Final = re.compile(
    r"\[(?P<bracketed>[^\[\]]*)\](?::[0-9]*)?|(?P<ipv4>[0-9.]+):[0-9]*|(?P<bare>[^\[\]]*)"
)
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class TrustProxies:
    """An ASGI middleware that sets the scope's client to the caller for whom a proxy speaks.

    Each proxy adds the address from which it was called at the end of `X-Forwarded-For`, so the last one that
    is no proxy's own is the caller: what stands before it, the caller itself may have written. The header
    counts if the connection comes from a proxy, and for nothing else. A caller over a Unix socket has no
    address, and stays as it is.
    """

    def __init__(self, app: ASGIApp, proxies: Iterable[str]) -> None:
        """proxies: addresses and networks. Raises ValueError if one is neither."""
        self._app = app
        self._proxies = [ip_network(one) for one in proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") if scope["type"] == "http" else None
        if client is not None and is_one_of(client[0], self._proxies):
            scope[PROXIED] = True
            hops = header_lines(scope, b"x-forwarded-for")
            if (caller := find_caller(hops, self._proxies)) is not None:
                scope["client"] = (caller, 0)
            scheme = header_lines(scope, b"x-forwarded-proto")[-1:]
            if scheme and (said := scheme[0].rpartition(",")[2].strip().lower()) in ("http", "https"):
                scope["scheme"] = said
        await self._app(scope, receive, send)


def find_caller(lines: Sequence[str], proxies: Sequence[Network]) -> str | None:
    """Returns the last address in these lines of a header that is no proxy's, or the first if all are
    proxies'. It is `UNKNOWN` if something else stands before it is found, and None if there is no line."""
    if not lines:
        return None
    caller = UNKNOWN
    for hop in reversed(",".join(lines).rsplit(",", MOST_HOPS)):
        address = read_address(hop)
        if address is None:
            return UNKNOWN
        caller = str(address)
        if not _is_in(address, proxies):
            break
    return caller


def read_address(text: str) -> Address | None:
    """Returns the address in a text like `10.0.0.1`, `10.0.0.1:80`, `2001:db8::1`, `[2001:db8::1]:443` or
    `fe80::1%eth0`, or None if there is none. An IPv4 address that is written as IPv6 is an IPv4 address."""
    found = _HOP.fullmatch(text.strip())
    if found is None or len(text) > 80:
        return None
    try:
        address = ip_address(found["bracketed"] or found["ipv4"] or found["bare"] or "")
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def network_of(address: str) -> str:
    """Returns under which address a caller is counted: its own, or of IPv6 the network of 64 bits, which one
    subscriber has as a rule, and of which the rest is theirs to choose. What is no address stays as it is."""
    found = read_address(address)
    if not isinstance(found, IPv6Address):
        return address if found is None else str(found)
    return str(IPv6Network((int(found), NETWORK_BITS), strict=False))


def is_loopback(address: str) -> bool:
    """Returns whether a text is an address of this machine that no other machine can call."""
    found = read_address(address)
    return found is not None and found.is_loopback


def is_one_of(address: str, networks: Iterable[Network]) -> bool:
    found = read_address(address)
    return found is not None and _is_in(found, networks)


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def header_lines(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of a header, in the order in which they came."""
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]
