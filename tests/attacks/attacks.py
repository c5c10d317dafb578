"""The attacks, each a function of a fleet that says in a line what it saw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import aiohttp

from tests.attacks.fleet import Fleet, post

Attack = Callable[[Fleet], Awaitable[str]]


class Reached(Exception):
    """The attack has reached its end, whatever the innocent clients saw. The message says how."""


CHAIN: Final = 5000
CHAT: Final = {"model": "sums", "messages": [{"role": "user", "content": "What is 1 + 1?"}], "max_tokens": 8}


async def _guided(fleet: Fleet, bodies: list[dict[str, Any]], *, patience: float = 60) -> str:
    """Asks with guides, all at once. Returns how the answers were."""
    timeout = aiohttp.ClientTimeout(total=patience)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(body: dict[str, Any]) -> str:
            try:
                status, text = await post(session, f"{fleet.url}/v1/chat/completions", CHAT | body)
            except (aiohttp.ClientError, TimeoutError) as error:
                return type(error).__name__
            return f"{status} {json.loads(text).get('error', {}).get('code', '')}".strip()

        return _counted(await asyncio.gather(*map(one, bodies)))


def _counted(answers: list[str]) -> str:
    return ", ".join(f"{count} × {answer}" for answer, count in Counter(answers).most_common())


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


async def chained_references(fleet: Fleet) -> str:
    links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(CHAIN)}
    schema = {"$ref": "#/$defs/d0", "$defs": links | {f"d{CHAIN}": {"type": "string"}}}
    return await _guided(fleet, [_schema(schema)] * 3)


async def chained_rules(fleet: Fleet) -> str:
    rules = "\n".join(f"r{at}: r{at + 1}" for at in range(CHAIN))
    return await _guided(fleet, [{"guided_grammar": f'start: r0\n{rules}\nr{CHAIN}: "a"'}] * 3)


async def optional_characters(fleet: Fleet) -> str:
    return await _guided(fleet, [{"guided_regex": "a?" * 60_000}, {"guided_regex": "a?" * 8_000}])


async def many_properties(fleet: Fleet) -> str:
    names = [{f"p{one}_{at}": {"type": "string"} for at in range(10_000)} for one in range(24)]
    bodies = [_schema({"type": "object", "properties": properties}) for properties in names]
    gone = await _guided(fleet, bodies, patience=0.7)
    begun = time.monotonic()
    after = await _guided(fleet, [{"model": "guide", "guided_regex": "[ab]+"}], patience=300)
    return f"{gone}; then a small guide of another model: {after} after {time.monotonic() - begun:.1f} s"


async def nothing_fits(fleet: Fleet) -> str:
    return await _guided(fleet, [_schema({"$ref": "#"}), {"guided_regex": "(x?){5000}x{5000}"}])


async def long_prompts(fleet: Fleet) -> str:
    text = "a b " * (7_400_000 // 4)
    bodies = [{"model": "sums", "prompt": text, "max_tokens": 4}] * 8
    timeout = aiohttp.ClientTimeout(total=8)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(body: dict[str, Any]) -> str:
            try:
                return str((await post(session, f"{fleet.url}/v1/completions", body))[0])
            except (aiohttp.ClientError, TimeoutError) as error:
                return type(error).__name__

        return _counted(await asyncio.gather(*map(one, bodies)))


async def endless_trailers(fleet: Fleet) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    taken, line, begun = 0, b"x-trailer: " + b"y" * 1000 + b"\r\n", time.monotonic()
    with suppress(ConnectionError, TimeoutError):
        while taken < 143 << 20 and time.monotonic() - begun < 30:
            writer.write(line * 64)
            async with asyncio.timeout(5):
                await writer.drain()
            taken += 64 * len(line)
    writer.close()
    return f"{taken / (1 << 20):.1f} MiB of trailers were taken"


async def generated_documents(fleet: Fleet) -> str:
    taken: list[float] = []

    async def reading() -> None:
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until:
                begun = time.monotonic()
                async with session.get(f"{fleet.url}/openapi.json") as response:
                    await response.read()
                taken.append(time.monotonic() - begun)

    until = time.monotonic() + 5
    await asyncio.gather(*(reading() for _ in range(8)))
    return f"{len(taken)} documents in 5 s"


async def many_at_once(fleet: Fleet) -> str:
    models: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        url = f"{fleet.url}/v1/chat/completions"
        asking = [group.create_task(post(session, url, CHAT | {"max_tokens": 32})) for _ in range(500)]
        while not all(task.done() for task in asking):
            begun = time.monotonic()
            async with session.get(f"{fleet.url}/v1/models") as response:
                await response.read()
            models.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)
    answers = _counted([str(task.result()[0]) for task in asking])
    return f"{answers}; /v1/models p99 {sorted(models)[int(0.99 * len(models))]:.2f} s of {len(models)}"


async def unread_streams(fleet: Fleet) -> str:
    body = json.dumps(CHAT | {"stream": True, "n": 8, "max_tokens": 400, "ignore_eos": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    connections = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", fleet.port, limit=1) for _ in range(500))
    )
    for _, writer in connections:
        writer.write(head + body)
    await asyncio.sleep(20)
    for _, writer in connections:
        writer.close()
    return "500 streams of 8 choices, unread for 20 s"


async def bad_requests(fleet: Fleet) -> str:
    answers: list[str] = []
    for _ in range(60):
        pairs = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", fleet.port) for _ in range(50)), return_exceptions=True
        )
        for pair in pairs:
            if isinstance(pair, BaseException):
                answers.append(type(pair).__name__)
                continue
            reader, writer = pair
            writer.write(b"\x00garbage\r\n\r\n")
            try:
                async with asyncio.timeout(5):
                    answers.append((await reader.readline())[:12].decode("latin-1").strip())
            except (TimeoutError, ConnectionError) as error:
                answers.append(type(error).__name__)
            writer.close()
    if any(answer != "HTTP/1.1 400" for answer in answers):
        raise Reached(_counted(answers))
    return _counted(answers)


async def bad_requests_and_a_kill(fleet: Fleet) -> str:
    said = await bad_requests(fleet)
    killed = fleet.engines()[0]
    os.kill(killed, signal.SIGKILL)
    await asyncio.sleep(10)
    if len(fleet.engines()) != 2 or killed in fleet.engines():
        raise Reached(f"{said}; a killed engine stayed dead")
    return f"{said}; a killed engine came back"


async def stopped_gateway(fleet: Fleet) -> str:
    gateway = fleet.gateway()
    os.kill(gateway, signal.SIGSTOP)
    begun = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.monotonic() - begun < 60:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{fleet.url}/health") as response:
                    if response.status == 200:
                        return f"another gateway answered after {time.monotonic() - begun:.1f} s"
            await asyncio.sleep(0.2)
    os.kill(gateway, signal.SIGCONT)
    raise Reached("no other gateway answered within 60 s")


PROGRAMS: Final = {
    "SystemExit": "raise SystemExit(3)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "endless loop": "while True: pass",
}
ATTACKS: Final[dict[str, Attack]] = {
    "1 chained references": chained_references,
    "1 chained rules": chained_rules,
    "2 long prompts": long_prompts,
    "3 endless trailers": endless_trailers,
    "6 optional characters": optional_characters,
    "7 many properties": many_properties,
    "10 generated documents": generated_documents,
    "11 nothing fits": nothing_fits,
    "14 many at once": many_at_once,
    "15 unread streams": unread_streams,
}
"""Attacks beside which an innocent client asks another model."""
