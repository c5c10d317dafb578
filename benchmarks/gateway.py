"""What the gateway costs: streamed tokens a second, and its share of the time to the first token.

The engine is played by a client that yields one token a frame as fast as it is asked. The server runs in a
process of its own, pinned to one core where the system allows; the clients read raw bytes on another.

    python benchmarks/gateway.py [--streams 64] [--tokens 500]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvloom.api.app import create_app
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, Event, ModelCard, StartGenerate, TokenEvent
from kvloom.types.service import Service


def model_card() -> ModelCard:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ModelCard(
        name="bench",
        path="",
        context_length=100_000,
        vocab_size=256,
        tokenizer=tokenizer.to_str(),
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture="",
        parameters=0,
        dtype="float32",
    )


class EagerEngine:
    """A token whenever one is asked for, one a frame."""

    def __init__(self) -> None:
        self._card = model_card()

    async def models(self) -> list[ModelCard]:
        return [self._card]

    async def abort(self, request: str, choice: int | None = None) -> None: ...

    async def loads(self) -> dict[str, UnitLoad]:
        return {}

    @property
    def services(self) -> dict[str, Service]:
        return {}

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        for index in range(body.sampling.max_tokens):
            await asyncio.sleep(0)
            yield [TokenEvent(0, index, 31 + index % 26)]
        yield [EndEvent(0, "length")]


def serve(port: Connection, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    config = uvicorn.Config(create_app(EagerEngine()), port=0, log_level="error", lifespan="off")
    listener = config.bind_socket()
    listener.listen(1024)
    port.send(listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])


def post(path: str, body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def stream(port: int, request: bytes) -> tuple[float, float]:
    """Seconds to the first token's event, and to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = time.perf_counter()
    writer.write(request)
    await reader.readuntil(b'"content":"@"')
    first = time.perf_counter() - begin
    tail = b""
    while b"[DONE]" not in tail:
        tail = tail[-16:] + await reader.read(1 << 16)
    writer.close()
    return first, time.perf_counter() - begin


async def measure(port: int, streams: int, tokens: int) -> None:
    chat: dict[str, object] = {"model": "bench", "stream": True, "max_tokens": tokens}
    chat["messages"] = [{"role": "user", "content": "What is a KV cache? " * 20}]
    request = post("/v1/chat/completions", chat)
    short = post("/v1/chat/completions", chat | {"max_tokens": 1})
    for _ in range(20):
        await stream(port, short)
    firsts = [(await stream(port, short))[0] * 1e3 for _ in range(200)]
    print(f"time to first token at one request: median {statistics.median(firsts):.2f} ms, "
          f"p99 {sorted(firsts)[197]:.2f} ms")  # fmt: skip
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        await asyncio.gather(*(stream(port, request) for _ in range(streams)))
        rates.append(streams * tokens / (time.perf_counter() - begin))
    print(
        f"{streams} streams: median {statistics.median(rates):,.0f} tokens/s of {[round(r) for r in rates]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, cores[-1] if len(cores) > 1 else None))
    server.start()
    try:
        asyncio.run(measure(here.recv(), arguments.streams, arguments.tokens))
    finally:
        server.terminate()
        server.join()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"server's peak memory: {peak:.0f} MB")


if __name__ == "__main__":
    main()
