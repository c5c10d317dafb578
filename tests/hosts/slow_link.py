"""A link with delay and loss: `python -m tests.hosts.slow_link ONE OTHER DELAY LOSS SEED`.

It carries frames between two interfaces of this machine, each DELAY seconds late, and drops a share LOSS of
them. Kernels that can do this themselves (`tc netem`) are rare where tests run.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

_ALL: Final = 3  # ETH_P_ALL
_PACKET: Final = 263  # SOL_PACKET
_OFFLOADS: Final = 15  # PACKET_VNET_HDR: what the kernel leaves to a card comes and goes with each frame
_FORCED: Final = 33  # SO_RCVBUFFORCE
_LONGEST: Final = 1 << 17
_ROOM: Final = 8 << 20  # bytes that wait in a socket


def carry(ones: str, others: str, delay: float, loss: float, seed: int) -> None:
    """Carries frames until this process is ended. ones, others: the interfaces."""
    one, other = (_opened(name) for name in (ones, others))
    print("up", flush=True)
    across = {one: other, other: one}
    draw = random.Random(seed)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # in the order in which they are due
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([one, other], [], [], due)[0]:
            frame, sender = ready.recvfrom(_LONGEST)
            if sender[2] != socket.PACKET_OUTGOING and draw.random() >= loss:
                waiting.append((time.monotonic() + delay, across[ready], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, frame = waiting.popleft()
            with suppress(OSError):  # a full card drops frames too
                to.send(frame)


def _opened(name: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    made.setsockopt(_PACKET, _OFFLOADS, 1)
    made.setsockopt(socket.SOL_SOCKET, _FORCED, _ROOM)
    made.bind((name, _ALL))
    return made


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
