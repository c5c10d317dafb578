"""Checks whether the hosts of a cluster reach each other. This comes before Ray is asked, which would wait
for long."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvloom.types.errors import ConfigError

REACH_SECONDS: Final = 5.0  # for the head to answer


def host_and_port(text: str, key: str) -> tuple[str, int]:
    """Returns the two parts of `HOST:PORT`. key: the words that stand before the text in a message. Raises
    ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{key}: no address; HOST:PORT of a cluster's head, as 10.0.0.1:6379, is right")
    return host, int(port)


def require_head(head: str, key: str) -> None:
    """Raises ConfigError if nothing takes connections at a cluster's head within a few seconds. head:
    `HOST:PORT`; key: the words that stand before it in a message."""
    if problem := _problem(host_and_port(head, key)):
        raise ConfigError(f"{key}: cannot be reached ({problem}); HOST:PORT of a cluster's head is right")


def require_own(address: str) -> None:
    """Raises ConfigError if an address is none of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(
                f"--address {address}: no address of this host ({error.strerror}); one of its own is right"
            ) from error


def require_no_ray(address: str) -> None:
    """Raises ConfigError if this host is in a cluster already: Ray would count its memory, cores and GPUs
    twice."""
    node = f"--node_ip_address={address}".encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            arguments = file.read_bytes().split(b"\0")
            if arguments[0].endswith(b"/raylet") and node in arguments:
                raise ConfigError(
                    f"this host, {address}, is in a cluster already; `kvloom cluster stop` lets it leave"
                )


def require_way_back(address: str, head: str) -> None:
    """Raises ConfigError if the head, which can be reached, does not reach this host at an address of its
    own. A connection that begins at that address is answered only if the answers come there."""
    if problem := _problem(host_and_port(head, head), address):
        raise ConfigError(
            f"--address {address}: {head} does not reach this host there ({problem}); an address of this "
            "host that the other hosts reach is right"
        )


def _problem(peer: tuple[str, int], source: str = "") -> str:
    """Returns why no connection to a peer can be made; nothing if one can. source: the address of this host
    at which the connection begins, if it is not left open."""
    begin = (source, 0) if source else None
    try:
        socket.create_connection(peer, REACH_SECONDS, begin).close()
    except TimeoutError:
        return f"no answer in {REACH_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
