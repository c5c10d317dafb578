"""What the gateway adds to the first token, and how many streamed tokens a second it keeps up with.

python -m benchmarks.streaming. Three processes, as in a fleet: the real gateway, the real engine and verbs
over a device that takes no time (null_engine), and a client in a process of its own. First tokens: one
request at a time, through the gateway and straight at the engine's verb, in turn. Streams: 64 at once, from
an engine that makes a token for each every so often; a pace is kept if the client sees at least 95 % of it,
each token in an event of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec.structs import replace
from rich.console import Console

from benchmarks.load import Load
from benchmarks.null_engine import Shape
from benchmarks.procfs import cpu_seconds
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask
from kvloom.api.app import DEFAULT_MAX_BODY
from kvloom.cluster.launcher import Snapshot
from kvloom.cluster.state import ComponentStatus, FleetSpec, FleetStatus, UnitSpec
from kvloom.router.client import HttpEngineClient
from kvloom.serve.local import GATEWAY_MODULE
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.messages import GatewayOrder, Ready
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec

MOST_MS, LEAST_PACE = 3.0, 5000.0
KEPT = 0.95
PROMPT = [300] * 128
ONE = Shape()


@dataclass(frozen=True, slots=True)
class Effort:
    """rounds: requests for the first token's time. paces: tokens a second offered. tokens: of a stream."""

    rounds: int = 200
    paces: Sequence[float] = (2500.0, 5500.0, 7500.0, 10000.0, 15000.0)
    streams: int = 64
    tokens: int = 600


@dataclass(frozen=True, slots=True)
class Front:
    """An engine and its gateway. engine: the verbs' address, url: the gateway's."""

    engine: str
    secret: str
    url: str
    gateway_pid: int
    engine_pid: int


def serving(sockets: Mapping[str, str]) -> Snapshot:
    """Returns a fleet whose units serve. sockets: their paths by unit."""
    engine = EngineSpec(
        models=(ModelSpec(name="m", path=""),),
        kv_bytes=0,
        block_bytes=0,
        policy="fcfs",
        max_running=1,
        max_waiting=1,
        chunk_tokens=1,
        threads=1,
    )
    spec = FleetSpec(units={unit: UnitSpec(engine=replace(engine, unit=unit)) for unit in sockets})
    processes = {
        unit: ComponentStatus(phase="ready", generation=1, endpoint=path) for unit, path in sockets.items()
    }
    return Snapshot(seq=1, spec=spec, status=FleetStatus(processes=processes))


@asynccontextmanager
async def front(period: float, shape: Shape = ONE) -> AsyncIterator[Front]:
    """Yields null engines, all in one process, and their gateway."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        secret = secrets.token_hex(16)
        urls = {unit: f"unix://{Path(folder) / name}" for unit, name in shape.sockets.items()}
        argv = ["--folder", folder, "--secret", secret, "--period", str(period)]
        argv += ["--units", str(shape.units), "--models", str(shape.models)]
        argv += [] if shape.context is None else ["--context", str(shape.context)]
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.null_engine", *argv, stdout=asyncio.subprocess.PIPE
        )
        assert engine.stdout is not None
        gateway = await ChildProcess.start("gateway", GATEWAY_MODULE, [listener.fileno()])
        try:
            if await engine.stdout.readline() != b"ready\n":
                raise RuntimeError("the null engine did not start")
            order = GatewayOrder(
                secret=secret,
                listeners=(listener.fileno(),),
                api_keys={},
                max_body=DEFAULT_MAX_BODY,
                max_connections=1 << 16,
                program=ProgramSpec("data_parallel"),
                folder=folder,
                sockets=folder,
            )
            await gateway.order(
                order, serving({unit: str(Path(folder) / name) for unit, name in shape.sockets.items()})
            )
            await _ready(gateway)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Front(urls["unit-0"], secret, url, gateway.pid, engine.pid)
        finally:
            gateway.terminate()
            engine.terminate()
            await gateway.ended()
            await engine.wait()


async def _ready(gateway: ChildProcess) -> None:
    async for report in gateway.reports():
        if isinstance(report, Ready):
            return
    raise RuntimeError("the gateway did not start")


async def first_tokens(rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token: at the verb, and through the gateway."""
    direct, through = [], []
    async with front(0.0) as here, HttpEngineClient(here.engine, secret=here.secret) as client:
        load = Load({"m": here.url}, stream=True)
        for i in range(rounds + 20):
            straight = await _first(client, f"direct-{i}")
            (outcome,), _ = await load.drive([Ask("m", PROMPT, 8)])
            if outcome.error is not None or outcome.ttft is None:
                raise RuntimeError(outcome.error or "no token came")
            if i >= 20:
                direct.append(1e3 * straight)
                through.append(1e3 * outcome.ttft)
    return direct, through


async def _first(client: HttpEngineClient, request: str) -> float:
    """Seconds to the first token of a stream, which is read to its end."""
    body = StartGenerate(
        model="m", request=request, prompt=PROMPT, sampling=SamplingParams(max_tokens=8, seed=1)
    )
    began, first = time.perf_counter(), 0.0
    async with aclosing(client.start_generate(body)) as frames:
        async for frame in frames:
            if frame and not first:
                first = time.perf_counter() - began
    return first


@dataclass(frozen=True, slots=True)
class Stream:
    """tokens a second that were offered and that came; CPU seconds for 1,000 tokens."""

    offered: float
    came: float
    chunks_a_token: float
    gateway_cpu: float
    engine_cpu: float

    @property
    def kept(self) -> bool:
        return self.came >= KEPT * self.offered and self.chunks_a_token > 0.99


async def stream(offered: float, streams: int, tokens: int) -> Stream:
    async with front(streams / offered) as here:
        argv = ["--url", here.url, "--model", "m", "--stream", "--requests", str(streams)]
        await client([*argv, "--output", "8"])
        before = cpu_seconds(here.gateway_pid), cpu_seconds(here.engine_pid)
        seen = await client([*argv, "--output", str(tokens)])
        gateway = cpu_seconds(here.gateway_pid) - before[0]
        engine = cpu_seconds(here.engine_pid) - before[1]
    total = seen["tokens"]
    return Stream(
        offered,
        seen["tokens_per_second"],
        seen["chunks"] / total,
        1e3 * gateway / total,
        1e3 * engine / total,
    )


async def client(argv: Sequence[str]) -> dict[str, float]:
    """Returns what a client in a process of its own has seen (benchmarks.load). Raises RuntimeError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load", *argv, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    seen: dict[str, float] = json.loads(output)
    if process.returncode or seen["errors"]:
        raise RuntimeError(f"the client failed: {output.decode()}")
    return seen


async def measure(effort: Effort, console: Console) -> Report:
    machine = this_machine()
    console.print("gateway: first tokens", style="dim")
    direct, through = await first_tokens(effort.rounds)
    seen = []
    for pace in effort.paces:
        console.print(f"gateway: {effort.streams} streams at {pace:,.0f} tokens/s", style="dim")
        seen.append(await stream(pace, effort.streams, effort.tokens))
    kept = max((one.came for one in seen if one.kept), default=0.0)
    added = median(through) - median(direct)
    alone = 1 / median(one.gateway_cpu for one in seen) * 1e3
    return Report(
        name="streaming",
        title=f"{effort.streams} streams through the gateway (tokens/s; CPU seconds for 1,000 tokens)",
        columns=["offered", "came", "kept", "events a token", "gateway CPU", "engine CPU"],
        rows=[
            [s.offered, s.came, "yes" if s.kept else "no", s.chunks_a_token, s.gateway_cpu, s.engine_cpu]
            for s in seen
        ],
        findings=[
            Finding(what="gateway adds to the first token", value=added, unit=" ms", most=MOST_MS),
            Finding(what="first token at the verb, median", value=median(direct), unit=" ms"),
            Finding(what="first token through the gateway, median", value=median(through), unit=" ms"),
            Finding(what="pace kept, client and engine on the same cores", value=kept, unit=" tokens/s",
                    least=LEAST_PACE),
            Finding(what="a core's worth of gateway, by its CPU time", value=alone, unit=" tokens/s"),
        ],
        machine=machine,
    )  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    usual = Effort()
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--paces", nargs="+", type=float, default=usual.paces)
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each stream")
    options = parser.parse_args()
    console = Console()
    effort = Effort(options.rounds, options.paces, options.streams, options.tokens)
    publish(asyncio.run(measure(effort, console)), console)


if __name__ == "__main__":
    main()
