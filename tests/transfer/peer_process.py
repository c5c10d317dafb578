"""One unit's end of the KV plane, a process that `start` runs in.

It answers calls on a socket, each while others may wait. `set_gate` stops the copying thread once, at a
piece: "before" its fence or "inside" of it, until `ungate`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import numpy as np
import torch

from kvloom.exec.cuda.loader import DeviceArena
from kvloom.kernels.cpu import block_copy
from kvloom.kv.arena import Arena
from kvloom.transfer import nixl_plane, shared_memory, tcp
from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory, CudaTransfer, DeviceMemory
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import ArenaPlace, GpuPlace, HostPlace
from kvloom.transfer.paths import Paths
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.staging import ALWAYS, HALVES
from kvloom.transfer.tcp import TcpTransport
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import BadRequest, KvloomError
from kvloom.types.geometry import I32
from kvloom.types.transfer import BlockCopies, Transfer
from tests.transfer.device_memory import GatedMemory, HostMemory, LikeAGpu
from tests.transfer.wire import BLOCK_BYTES, BLOCKS, GRANT, SECRET, SLOTS, Answer, Call, Made, read

PIECE = 4 * BLOCK_BYTES  # between two fences


class Gate:
    def __init__(self) -> None:
        self._where = ""
        self._skip = 0
        self._reached, self._opened = threading.Event(), threading.Event()

    def set(self, where: str, skip: int) -> None:
        self._where, self._skip = where, skip
        self._reached.clear()
        self._opened.clear()

    def pass_through(self, where: str) -> None:
        """On the copying thread."""
        if self._where == where:
            self._skip -= 1
            if self._skip < 0:
                self._where = ""
                self._reached.set()
                self._opened.wait()

    async def reached(self) -> None:
        await asyncio.to_thread(self._reached.wait)

    def open(self) -> None:
        self._opened.set()


class Unit:
    """What can be called."""

    def __init__(self, kind: str, name: str) -> None:
        self._arena = _arena(kind)
        self._gate = Gate()
        self._transport = _TRANSPORTS[kind](name, self._arena, self._gate)
        self._transfers: dict[int, Transfer] = {}

    async def made(self) -> Made:
        fd = self._arena.fd if isinstance(self._arena, Arena) else -1
        return Made(os.getpid(), fd, self._transport.endpoint)

    async def read(self) -> bytes:
        """What is in the arena."""
        return self._arena.bytes.cpu().numpy().tobytes()

    async def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed).integers(0, 256, BLOCKS * BLOCK_BYTES, dtype=np.uint8)
        self._arena.bytes.copy_(torch.from_numpy(random))

    async def open(self, begin: int, digest: int, blocks: bytes) -> Ticket:
        return self._transport.open(begin, digest, blocks)

    async def received(self, ticket: Ticket) -> int:
        return self._transport.received(ticket)

    async def close(self, ticket: Ticket) -> bool:
        return self._transport.close(ticket)

    async def claim(
        self, number: int, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int
    ) -> None:
        self._transfers[number] = self._transport.claim(peer, address, digest, begin, end)

    async def put(self, number: int, copies: list[list[int]]) -> None:
        """From a thread of its own."""
        own, peer, offsets, counts = (np.array(array, np.int32) for array in copies)
        await asyncio.to_thread(self._transfers[number].put, BlockCopies(own, peer, offsets, counts))

    async def put_junk(self, number: int) -> None:
        """What no code of ours puts: the copying thread cannot know what to do with it."""
        self._transfers[number].put(BlockCopies(None, None, None, None))  # type: ignore[arg-type]

    async def arrived(self, number: int) -> None:
        await self._transfers[number].arrived()

    async def state(self, number: int) -> str:
        return self._transfers[number].state.value

    async def abandon(self, number: int) -> None:
        self._transfers[number].abandon()

    async def set_gate(self, where: str, skip: int) -> None:
        self._gate.set(where, skip)

    async def at_gate(self, number: int) -> None:
        """Raises what the transfer fails of before it comes there, and BadRequest where it arrives first."""
        settled = self._transfers[number]._settled  # type: ignore[attr-defined]
        reached = asyncio.create_task(self._gate.reached())
        await asyncio.wait((reached, settled), return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            raise settled.result() or BadRequest("at_gate: the transfer arrived before it came to the gate")

    async def ungate(self) -> None:
        self._gate.open()

    async def drop(self) -> None:
        """Let go of all transfers."""
        self._transfers.clear()

    async def forget(self, unit: str) -> None:
        assert not isinstance(self._transport, TcpTransport | Paths)
        self._transport.forget(unit)

    async def close_all(self) -> None:
        self._transport.close_all()


def _arena(kind: str) -> Arena | DeviceArena:
    if kind in ("cuda", "nixl-cuda"):
        return DeviceArena(BLOCKS, BLOCK_BYTES, torch.device("cuda", 0))
    return Arena(BLOCKS, BLOCK_BYTES)


def _shm(name: str, arena: Any, gate: Gate) -> ShmTransport:
    copy_blocks, copy_piece = block_copy.copy_blocks, shared_memory.ShmTransfer._copy

    def inside(
        source: Any, target: Any, own: I32, peer: I32, offsets: I32, counts: I32, **layout: int
    ) -> None:
        gate.pass_through("inside")
        copy_blocks(source, target, own, peer, offsets, counts, **layout)

    def before(transfer: shared_memory.ShmTransfer, piece: BlockCopies) -> None:
        gate.pass_through("before")
        copy_piece(transfer, piece)

    setattr(shared_memory, "copy_blocks", inside)  # noqa: B010
    setattr(shared_memory.ShmTransfer, "PIECE", PIECE)  # noqa: B010
    setattr(shared_memory.ShmTransfer, "_copy", before)  # noqa: B010
    return ShmTransport(name, arena, slots=SLOTS)


def _device(name: str, arena: Any, gate: Gate, memory: DeviceMemory | None = None) -> CudaIpcTransport:
    copy_piece = CudaTransfer._copy

    def before(transfer: CudaTransfer, piece: BlockCopies) -> None:
        gate.pass_through("before")
        copy_piece(transfer, piece)

    setattr(CudaTransfer, "PIECE", PIECE)  # noqa: B010
    setattr(CudaTransfer, "_copy", before)  # noqa: B010
    gated = GatedMemory(memory or HostMemory(arena), lambda: gate.pass_through("inside"))
    return CudaIpcTransport(name, arena, gated, slots=SLOTS)


def _cuda(name: str, arena: Any, gate: Gate) -> CudaIpcTransport:
    return _device(name, arena, gate, CudaMemory(torch.device("cuda", 0)))


def _nixl(name: str, arena: Any, gate: Gate, place: ArenaPlace | None = None) -> NixlTransport:
    write = nixl_plane.NixlPlane._write

    def before(self: nixl_plane.NixlPlane, transfer: nixl_plane.NixlTransfer, piece: BlockCopies) -> None:
        gate.pass_through("before")
        gate.pass_through("inside")
        write(self, transfer, piece)

    setattr(nixl_plane.NixlPlane, "_write", before)  # noqa: B010
    return NixlTransport(name, arena, place or HostPlace(PIECE), slots=SLOTS, grant=GRANT)


def _nixl_device(name: str, arena: Any, gate: Gate) -> NixlTransport:
    return _nixl(name, arena, gate, LikeAGpu(PIECE))


def _nixl_cuda(name: str, arena: Any, gate: Gate) -> NixlTransport:
    return _nixl(name, arena, gate, GpuPlace(torch.device("cuda", 0), PIECE))


def _nixl_staged(name: str, arena: Any, gate: Gate) -> NixlTransport:
    stage = nixl_plane.NixlPlane._stage

    def before(self: nixl_plane.NixlPlane, transfer: nixl_plane.NixlTransfer) -> bool:
        if len(transfer.halves) < HALVES:  # or nothing is written now
            gate.pass_through("before")
            gate.pass_through("inside")
        return stage(self, transfer)

    setattr(nixl_plane.NixlPlane, "_stage", before)  # noqa: B010
    return NixlTransport(name, arena, HostPlace(PIECE), slots=SLOTS, grant=GRANT, costs=ALWAYS)


def _paths(name: str, arena: Any, gate: Gate) -> Paths:
    return Paths(name, _shm(name, arena, gate), [_tcp(name, arena, gate)])


def _far_paths(name: str, arena: Any, gate: Gate) -> Paths:
    """Each unit says that it is on a host of its own."""
    return Paths(name, _shm(name, arena, gate), [_tcp(name, arena, gate)], host=name)


def _tcp(name: str, arena: Any, gate: Gate) -> TcpTransport:
    send_piece = tcp.TcpPlane._send_piece

    def before(self: tcp.TcpPlane, sock: socket.socket, piece: tcp.Piece) -> None:
        gate.pass_through("before")
        gate.pass_through("inside")
        send_piece(self, sock, piece)

    setattr(tcp, "PIECE", PIECE)  # noqa: B010
    setattr(tcp.TcpPlane, "_send_piece", before)  # noqa: B010
    return TcpTransport(name, arena, SECRET, slots=SLOTS, links=2)


_TRANSPORTS: dict[
    str, Callable[[str, Any, Gate], ShmTransport | CudaIpcTransport | NixlTransport | TcpTransport | Paths]
] = {
    "paths": _paths,
    "far-paths": _far_paths,
    "nixl-staged": _nixl_staged,
    "shm": _shm,
    "tcp": _tcp,
    "device": _device,
    "cuda": _cuda,
    "nixl": _nixl,
    "nixl-device": _nixl_device,
    "nixl-cuda": _nixl_cuda,
}


def start(end: socket.socket, kind: str, name: str) -> None:
    os.environ["NIXL_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    asyncio.run(_serve(end, kind, name))


async def _serve(end: socket.socket, kind: str, name: str) -> None:
    """Until the caller closes its end."""
    reader, writer = await asyncio.open_connection(sock=end)
    unit = Unit(kind, name)
    calls: set[asyncio.Task[None]] = set()
    while body := await read(reader):
        calls.add(asyncio.create_task(_answer(unit, msgspec.msgpack.decode(body, type=Call), writer)))
    os._exit(0)  # whoever still waits at the gate


async def _answer(unit: Unit, call: Call, writer: asyncio.StreamWriter) -> None:
    method = getattr(unit, call.method)
    hints = get_type_hints(method)
    try:
        arguments = {name: msgspec.convert(value, hints[name]) for name, value in call.arguments.items()}
        answer = Answer(call.number, await method(**arguments))
    except KvloomError as error:
        answer = Answer(call.number, error=error.to_wire())
    except msgspec.ValidationError as error:  # as the verbs' server refuses a body
        answer = Answer(call.number, error=BadRequest(f"body: {error}").to_wire())
    body = msgspec.msgpack.encode(answer)
    writer.write(len(body).to_bytes(4, "little") + body)
