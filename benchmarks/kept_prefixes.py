"""First token of a prompt that an engine which was restarted has in files, against computing it.

python -m benchmarks.kept_prefixes [--shape A] [--lengths 500 2000] [--rounds 5]. In each round an engine
process over an empty folder computes a prompt and ends by SIGTERM, whereupon its prefix is written; another
process over the folder takes it from there. Both have answered a short prompt before. The files are written
out and dropped from the system's cache in between (`posix_fadvise`), so that they come from the disk.
`stopped` is what the SIGTERM takes, with the writing.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.engines import MODEL, engines
from benchmarks.places import BENCH
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.router.client import HttpEngineClient
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent

LENGTHS = (500, 2000)
MOST = 0.25  # of computing a prompt of the last length
WARM = 40  # tokens of the prompt that is answered first, more than a page
VOCAB = 8000
KV_BYTES = 1 << 30


async def first_token(client: HttpEngineClient, prompt: list[int]) -> tuple[float, int]:
    """Seconds until it came, and which it is."""
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    body = StartGenerate(model=MODEL, request=f"{began}", prompt=prompt, sampling=sampling)
    seconds, token = 0.0, -1
    async with aclosing(client.start_generate(body)) as frames:
        async for frame in frames:
            for event in frame:
                if isinstance(event, TokenEvent):
                    seconds, token = time.perf_counter() - began, event.token
    return seconds, token


async def life(shape: str, folder: Path, prompt: list[int], seed: int) -> tuple[float, int, int, float]:
    """Of one engine: seconds to the prompt's first token, which it is, how many tokens came from files, and
    the seconds in which it ended."""
    async with engines(1, shape, kv_bytes=KV_BYTES, cache_dir=folder) as (client,):
        await first_token(client, prompt_of(WARM, seed))
        seconds, token = await first_token(client, prompt)
        restored = (await client.load()).models[MODEL].restored_tokens_total
        ended = time.perf_counter()
    return seconds, token, restored, time.perf_counter() - ended


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB) for _ in range(length)]


def drop(folder: Path) -> int:
    """Takes the files out of the system's cache. Returns their bytes."""
    total = 0
    for file in folder.rglob("*.kv"):
        with file.open("rb") as kept:
            os.fsync(kept.fileno())
            os.posix_fadvise(kept.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(kept.fileno()).st_size
    return total


async def measure(shape: str, lengths: Sequence[int], rounds: int, console: Console) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    findings = []
    BENCH.mkdir(parents=True, exist_ok=True)
    for length in lengths:
        console.print(f"a prompt of {length} tokens", style="dim")
        computed, kept, stopped, size = [], [], [], 0
        for turn in range(rounds):
            prompt = prompt_of(length, 2 * turn)
            with tempfile.TemporaryDirectory(dir=BENCH) as made:
                folder = Path(made) / "cache"
                seconds, token, found, ending = await life(shape, folder, prompt, 2 * turn + 1)
                if found:
                    raise RuntimeError("an empty folder had pages")
                size = drop(folder)
                again, same, found, _ = await life(shape, folder, prompt, 2 * turn + 1)
                if found < 0.9 * length or same != token:
                    raise RuntimeError(
                        f"{found} of {length} tokens came from files: token {same}, not {token}"
                    )
            computed.append(seconds)
            kept.append(again)
            stopped.append(ending)
        ratio = median(b / a for a, b in zip(computed, kept, strict=True))
        rows.append(
            [length, size / 2**20, 1e3 * median(computed), 1e3 * median(kept), ratio, median(stopped)]
        )
        findings.append(
            Finding(
                what=f"{length} tokens: first token from files, of computing it",
                value=ratio,
                unit="×",
                most=MOST if length == max(LENGTHS) else None,
            )
        )
    return Report(
        name="kept-prefixes",
        title=f"First token of a prompt after a restart, shape {shape} (ms)",
        columns=["tokens", "MiB in files", "computed", "from files", "ratio", "stopped (s)"],
        rows=rows,
        findings=findings,
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="A")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    publish(asyncio.run(measure(options.shape, options.lengths, options.rounds, console)), console)


if __name__ == "__main__":
    main()
