"""The client of every server: token-id prompts to /v1/completions, greedy, to the last token asked for.

It shares the machine's cores with the server, so it does as little as it can: bodies are encoded before the
clock starts, and a stream's chunks are counted, not parsed. python -m benchmarks.load --url … drives any
server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import aiohttp
import msgspec

from benchmarks.workload import Ask, burst

_DATA, _DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's fate, in seconds since it was due. ttft: to the first token, where it was streamed;
    chunks: pieces of text that came; error: why it does not count."""

    ask: Ask
    latency: float
    tokens: int = 0
    ttft: float | None = None
    chunks: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians of the requests that succeeded. tpot: seconds a token after the first."""

    requests: int
    errors: int
    seconds: float
    tokens: int
    tokens_per_second: float
    chunks: int
    latency: float
    ttft: float | None
    tpot: float | None


class Load:
    """urls: the base URL of each model's server."""

    def __init__(self, urls: Mapping[str, str], *, stream: bool = False) -> None:
        self._urls = {model: f"{url}/v1/completions" for model, url in urls.items()}
        self._stream = stream

    async def drive(self, asks: Sequence[Ask]) -> tuple[list[Outcome], float]:
        """Send each when it is due; their outcomes and the seconds from the first due to the last answer."""
        bodies = [self._body(ask) for ask in asks]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        headers = {"content-type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(session, ask, body, started + ask.at))
                    for ask, body in zip(asks, bodies, strict=True)
                ]
        return [task.result() for task in tasks], time.perf_counter() - started

    def _body(self, ask: Ask) -> bytes:
        body: dict[str, object] = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.output,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body)

    async def _one(self, session: aiohttp.ClientSession, ask: Ask, body: bytes, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        try:
            async with session.post(self._urls[ask.model], data=body) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    return Outcome(ask, time.perf_counter() - due, error=f"{response.status}: {text}")
                read = _streamed if self._stream else _whole
                outcome = await read(response, ask, due)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            return Outcome(ask, time.perf_counter() - due, error=f"{type(error).__name__}: {error}")
        if outcome.tokens != ask.output:
            short = f"{outcome.tokens} tokens of {ask.output}"
            return Outcome(ask, outcome.latency, outcome.tokens, outcome.ttft, outcome.chunks, short)
        return outcome


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


async def _whole(response: aiohttp.ClientResponse, ask: Ask, due: float) -> Outcome:
    answer = _decode(await response.read())
    tokens = answer.usage.completion_tokens if answer.usage else 0
    return Outcome(ask, time.perf_counter() - due, tokens)


async def _streamed(response: aiohttp.ClientResponse, ask: Ask, due: float) -> Outcome:
    """The last event but [DONE] carries the usage; every event before it is a piece."""
    first: float | None = None
    chunks, tail = 0, b""
    async for data in response.content.iter_any():
        first = first or time.perf_counter() - due
        chunks += (tail[1 - len(_DATA) :] + data).count(_DATA)  # one may lie across two reads
        tail = (tail + data)[-4096:]
    latency = time.perf_counter() - due
    events = [part for part in tail.split(_DATA)[1:] if not part.startswith(_DONE)]
    usage = _decode(events[-1]).usage if events else None
    return Outcome(ask, latency, usage.completion_tokens if usage else 0, first, chunks - 2)


def summarise(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.tokens for outcome in good)
    streamed = [(o.ttft, (o.latency - o.ttft) / (o.tokens - 1)) for o in good if o.ttft and o.tokens > 1]
    return Summary(
        requests=len(outcomes),
        errors=len(outcomes) - len(good),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        chunks=sum(outcome.chunks for outcome in good),
        latency=median(outcome.latency for outcome in good) if good else float("nan"),
        ttft=median(ttft for ttft, _ in streamed) if streamed else None,
        tpot=median(tpot for _, tpot in streamed) if streamed else None,
    )


async def lone_latency(load: Load, asks: Sequence[Ask]) -> list[float]:
    """Seconds of each request, sent when the one before has ended. Raises RuntimeError where one fails."""
    latencies = []
    for ask in asks:
        (outcome,), _ = await load.drive([ask])
        if outcome.error is not None:
            raise RuntimeError(f"{ask.model}: {outcome.error}")
        latencies.append(outcome.latency)
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description="drive one server and print what it did")
    parser.add_argument("--url", required=True, help="http://host:port")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = Load({options.model: options.url}, stream=options.stream)
    asks = burst(options.model, options.requests, options.output, options.seed)
    outcomes, seconds = asyncio.run(load.drive(asks))
    for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
        print("error:", error)
    print(msgspec.json.format(msgspec.json.encode(asdict(summarise(outcomes, seconds)))).decode())


if __name__ == "__main__":
    main()
