"""Attacks by what an operator lets in: other tenants' prefixes, checkpoints, programs; and small ones."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any, Final

import aiohttp

from kvloom.config.config import DEMO
from tests.attacks.attacks import CHAT, PROGRAMS, Attack, Reached
from tests.attacks.fleet import Fleet, post

SECRET: Final = list(range(20, 84))  # the tokens of a prompt that the other tenant is not to find out
ASKS: Final = 8  # as many reach both units
TENANTS: Final = {"9 prefix oracle": ("innocent", "one", "other")}
"""The keys of the fleets on which attacks are played that need some."""
NESTED: Final = "{% for a in range(3000) %}" * 3 + "x" + "{% endfor %}" * 3


async def prefix_oracle(fleet: Fleet) -> str:
    """Two tenants send one prompt, the second one once. `cached_tokens` tells it of the first, or not."""
    found: dict[str, int] = {}
    body = {"model": "sums", "prompt": SECRET, "max_tokens": 1}
    async with aiohttp.ClientSession() as session:
        for name in ["one"] * ASKS + ["other"]:
            url, headers = f"{fleet.url}/v1/completions", fleet.headers(name)
            status, text = await post(session, url, body, headers)
            if status != 200:
                return f"{name}: {status} {text}"
            found[name] = json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]
    said = f"cached tokens: {found['one']} of one's own, {found['other']} of another tenant's"
    if found["other"]:
        raise Reached(said)
    return said


async def hostile_checkpoint(fleet: Fleet) -> str:
    """A checkpoint whose chat template would run for minutes, and one with a normaliser of 10 MB."""
    said = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for name in ("loops", "normaliser"):
            folder = fleet.folder / name
            shutil.copytree(DEMO / "sums", folder)
            if name == "loops":
                (folder / "chat_template.jinja").write_text(NESTED)
            else:
                tokenizer = json.loads((folder / "tokenizer.json").read_text())
                tokenizer["normalizer"] = _replacing(10_000_000)
                (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
            body = {"model": {"name": name, "path": str(folder)}}
            fleet.restarted |= {"engine_process unit-0", "engine_process unit-1"}  # one takes the model
            said.append(f"{name}: added {await _status(session, fleet, '/admin/models', body)}")
            chat = CHAT | {"model": name}
            said.append(f"asked {await _status(session, fleet, '/v1/chat/completions', chat)}")
    return ", ".join(said)


def _replacing(size: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * size}


async def raising_programs(fleet: Fleet) -> str:
    """Programs that raise what ends an interpreter. One with an endless loop is a gateway that hangs."""
    said = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        for number, (name, line) in enumerate(PROGRAMS.items()):
            if name == "endless loop":
                continue
            module = f"raising_{number}"
            source = f"async def program(call, fleet):\n    {line}\n    yield []\n"
            (fleet.folder / f"{module}.py").write_text(source)
            await _status(session, fleet, "/admin/program", {"name": f"{module}:program"})
            gateway = fleet.gateway()
            asked = await _status(session, fleet, "/v1/chat/completions", CHAT)
            lives = "lives" if fleet.gateway() == gateway else "has ended"
            said.append(f"{name}: asked {asked}, the gateway {lives}")  # 200: it is answered without one
            await _status(session, fleet, "/admin/program", {"name": "data_parallel"})
    return ", ".join(said)


async def small_ones(fleet: Fleet) -> str:
    """Heads, hosts and origins."""
    said = []
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 100_000 + b"\r\n\r\n")
    said.append(f"head of 100 KB: {(await reader.readline())[9:12].decode()}")
    writer.close()
    async with aiohttp.ClientSession() as session:
        for name, headers in {
            "another host": {"host": "evil.example", "content-type": "application/json"},
            "another origin": {"origin": "http://evil.example", "content-type": "application/json"},
            "text/plain": {"content-type": "text/plain", "origin": "http://evil.example"},
        }.items():
            url = f"{fleet.url}/v1/chat/completions"
            async with session.post(url, data=json.dumps(CHAT), headers=headers) as answer:
                said.append(f"{name}: {answer.status}")
    return ", ".join(said)


async def full_queue(fleet: Fleet) -> str:
    """Fills the queue of a model from one address. The innocent client of that model tells the rest."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        body = CHAT | {"max_tokens": 200, "ignore_eos": True}
        asked = (_status(session, fleet, "/v1/chat/completions", body) for _ in range(1500))
        answers = await asyncio.gather(*asked)
    return f"{answers.count('200')} of {len(answers)} answered"


async def _status(session: aiohttp.ClientSession, fleet: Fleet, path: str, body: Any) -> str:
    try:
        return str((await post(session, fleet.url + path, body))[0])
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


STRANGERS: Final[dict[str, Attack]] = {
    "9 prefix oracle": prefix_oracle,
    "12 hostile checkpoint": hostile_checkpoint,
    "13 raising programs": raising_programs,
    "small ones": small_ones,
    "full queue": full_queue,
}
