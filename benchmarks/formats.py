"""Decoding and prefill over weights in several number formats, side by side, and beside llama.cpp.

python -m benchmarks.formats [--shape qwen3-0.6b llama-3.2-1b A B] [--sides float32 q8_0 llama.cpp:q8_0]
[--rounds 5]. The sides have the same random checkpoint in bfloat16, or what `kvloom quantize` (int8, int4) or
llama.cpp's own tool (q8_0, q4_0, q4_k_m) makes of it; kvloom and llama.cpp read the same GGUF file. They
alternate turn by turn, so that neighbours on the machine slow all of them. Forwards alone, without the
engine's loop: a decode step of one request and of many, after 32 tokens each, and the prefill of one prompt.
Medians of the rounds. In each round memory is read as fast as the same threads can: the last columns are the
MB of weights that a step of one request reads, and at what share of that pace it does. All sides of a shape
are in memory at once. llama.cpp is llama-cpp-python, which is built from source in a venv on first use.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import numpy as np
import torch
from tools.make_checkpoint import BYTES, SHAPES
from tools.make_gguf import make_gguf

from benchmarks.bandwidth import MemoryReader, weight_bytes
from benchmarks.places import LLAMA_VENV, LOGS, checkpoint, quantized
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64
from kvloom.types.spec import Dtype, ModelSpec

BLOCK = 1 << 14
CONTEXT, CHUNK = 32, 512
ROUNDS = 5
SHARE = 80.0  # % of the machine's bandwidth that weights are to be read at
CACHED = 256 << 20  # bytes of weights that caches may hold, and so tell nothing of memory
WANTED: Final = ("qwen3-0.6b", "llama-3.2-1b", "A", "B")


class Side(Protocol):
    """One model, loaded in one format. weights: the bytes that a decode step reads of them; 0 if unknown."""

    weights: int

    def decode(self, rows: int, steps: int) -> float:
        """Returns the tokens a second of `rows` requests together."""

    def prefill(self, tokens: int) -> float:
        """Returns the tokens a second of one prompt."""


class Kvloom:
    """kvloom in this process."""

    def __init__(self, path: Path, dtype: Dtype) -> None:
        self._model = load_model(ModelSpec(name="m", path=str(path), dtype=dtype), BLOCK, CPU)
        self.weights = weight_bytes(self._model.module)

    def decode(self, rows: int, steps: int) -> float:
        batch = _Batch(self._model, rows, CONTEXT + steps + 1)
        batch.append(CONTEXT)
        batch.append(1)  # a step that is not measured
        begun = time.perf_counter()
        for _ in range(steps):
            batch.append(1)
        return rows * steps / (time.perf_counter() - begun)

    def prefill(self, tokens: int) -> float:
        batch = _Batch(self._model, 1, tokens)
        begun = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            batch.append(min(CHUNK, tokens - start))
        return tokens / (time.perf_counter() - begun)


class _Batch:
    """Sequences over a pool of their own."""

    def __init__(self, model: Any, rows: int, tokens: int) -> None:
        geometry = model.geometry
        arena = Arena(rows * geometry.blocks(tokens), BLOCK)
        self._view = arena.view(geometry.head_dim, model.kv_dtype)
        self._forward = model.forward
        pool = Pool(arena.blocks, {"m": geometry}, max_sequences=rows, max_tokens={"m": tokens})
        self._cache, self._sequences = pool.caches["m"], list(range(rows))
        for sequence in self._sequences:
            self._cache.add_sequence(sequence)
        self._random = np.random.default_rng(0)

    def append(self, count: int) -> None:
        """Runs a forward over `count` new tokens of each sequence, one sequence after the other if they are
        prompts."""
        every = [self._sequences] if count == 1 else [[one] for one in self._sequences]
        for some in every:
            appends = [count] * len(some)
            plan = self._cache.begin_forward(some, appends)
            tokens: I64 = self._random.integers(0, BYTES, sum(appends))
            with torch.inference_mode():
                logits = self._forward(tokens, np.cumsum(appends) - 1, ForwardState(plan, self._view))
                logits[: len(some)].argmax(-1)
            self._cache.end_forward(plan)


class LlamaCpp:
    """llama.cpp over a GGUF file, in a process that runs a turn when it is told to."""

    weights = 0

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()  # that it is ready

    def decode(self, rows: int, steps: int) -> float:
        return self._ask({"decode": rows, "steps": steps})

    def prefill(self, tokens: int) -> float:
        return self._ask({"prefill": tokens})

    def _ask(self, turn: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(turn) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"llama.cpp has ended with {self._process.wait()}; its words are in {LOGS}")
        return json.loads(line)


PEER, LLAMA_CPP = Path(__file__).with_name("llama_peer.py"), "llama-cpp-python==0.3.36"


def _llama_python() -> Path:
    """Returns the Python that has llama.cpp, built for this machine's processor on first use (minutes)."""
    if not list(LLAMA_VENV.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info")):
        venv.create(LLAMA_VENV, with_pip=True)
        build = ["-m", "pip", "-q", "install", "--no-binary", "llama-cpp-python", LLAMA_CPP]
        subprocess.run([LLAMA_VENV / "bin" / "python", *build], check=True)
    return LLAMA_VENV / "bin" / "python"


@contextmanager
def kvloom(path: Path, dtype: Dtype) -> Iterator[Side]:
    yield Kvloom(path, dtype)


@contextmanager
def llama_cpp(path: Path) -> Iterator[Side]:
    threads = len(os.sched_getaffinity(0))
    argv = [str(_llama_python()), str(PEER), "serve", str(path), str(threads), str(CONTEXT)]
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"llama.cpp-{path.stem}.log").open("w") as log:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        with process:
            try:
                yield LlamaCpp(process)
            finally:
                process.terminate()


def gguf(shape: str, kind: str | None) -> Path:
    """Returns the shape as a GGUF file of a kind by llama.cpp's own tool, or in bfloat16."""
    source = checkpoint(shape, "bfloat16")
    plain = source.with_name(f"{source.name}.gguf")
    out = source.with_name(f"{shape}-{kind}.gguf") if kind else plain
    if out.exists():
        return out
    if not plain.exists():
        make_gguf(source, plain)
    if kind is None:
        return plain
    argv = [str(_llama_python()), str(PEER), "quantize", str(plain), kind.upper(), str(out)]
    subprocess.run(argv, check=True, capture_output=True)
    return out


SIDES: Mapping[str, Callable[[str], AbstractContextManager[Side]]] = {
    "float32": lambda shape: kvloom(checkpoint(shape, "bfloat16"), "float32"),
    "bfloat16": lambda shape: kvloom(checkpoint(shape, "bfloat16"), "auto"),
    "int8": lambda shape: kvloom(quantized(shape, 8), "auto"),
    "int4": lambda shape: kvloom(quantized(shape, 4), "auto"),
    "q8_0": lambda shape: kvloom(gguf(shape, "q8_0"), "auto"),
    "q4_0": lambda shape: kvloom(gguf(shape, "q4_0"), "auto"),
    "q4_k_m": lambda shape: kvloom(gguf(shape, "q4_k_m"), "auto"),
    "llama.cpp:bfloat16": lambda shape: llama_cpp(gguf(shape, None)),
    "llama.cpp:q8_0": lambda shape: llama_cpp(gguf(shape, "q8_0")),
    "llama.cpp:q4_0": lambda shape: llama_cpp(gguf(shape, "q4_0")),
    "llama.cpp:q4_k_m": lambda shape: llama_cpp(gguf(shape, "q4_k_m")),
}
"""What makes a side of a shape."""
OURS: Final = ("float32", "bfloat16", "int8", "int4")
"""Those for which llama.cpp need not be there."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a side must reach against another one: at least so many times its tokens a second."""

    side: str
    other: str
    one: float | None = None
    many: float | None = None
    prefill: float | None = None


TARGETS: Final = (
    Target("bfloat16", "float32", one=1.7, many=1.4),
    Target("int8", "float32"),
    Target("int4", "float32", one=2.8),
    Target("bfloat16", "llama.cpp:bfloat16"),
    *(Target(kind, f"llama.cpp:{kind}", 1.0, 2.0, 1.0) for kind in ("q8_0", "q4_0", "q4_k_m")),
)


@dataclass(frozen=True, slots=True)
class Effort:
    many: int = 32
    steps: int = 12
    prompt: int = 1000
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class Pace:
    """What a side reached: tokens a second of each round. weights: the bytes that a step reads of them."""

    one: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    weights: int = 0

    def turn(self, side: Side, effort: Effort) -> None:
        self.one.append(side.decode(1, effort.steps))
        self.many.append(side.decode(effort.many, effort.steps))
        self.prefill.append(side.prefill(effort.prompt))

    @property
    def medians(self) -> tuple[float, float, float]:
        return median(self.one), median(self.many), median(self.prefill)


def compare(
    shape: str, names: Sequence[str], effort: Effort, reader: MemoryReader
) -> tuple[dict[str, Pace], float]:
    """Returns the paces of the sides, which alternate, and how many bytes a second the machine read
    meanwhile."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # of the calling thread
    reader.bandwidth()  # warms
    reads: list[float] = []
    with ExitStack() as stack:
        sides = {name: stack.enter_context(SIDES[name](shape)) for name in names}
        for side in sides.values():
            Pace().turn(side, effort)  # warms
        paces = {name: Pace(weights=side.weights) for name, side in sides.items()}
        for _ in range(effort.rounds):
            reads.append(reader.bandwidth())
            for name, side in sides.items():
                paces[name].turn(side, effort)
    return paces, median(reads)


def _findings(shape: str, paces: Mapping[str, Pace], many: int, bandwidth: float) -> Iterator[Finding]:
    for name, pace in paces.items():
        if pace.weights > CACHED:
            what = f"{shape}, one request: weights of {name} read, of what the machine reads"
            yield Finding(what=what, value=100 * _share(pace, bandwidth), unit=" %", least=SHARE)
    for target in TARGETS:
        if not {target.side, target.other} <= set(paces):
            continue
        ratios = zip(paces[target.side].medians, paces[target.other].medians, strict=True)
        told = ("one request", target.one), (f"{many} requests", target.many), ("prefill", target.prefill)
        for (what, least), (ours, theirs) in zip(told, ratios, strict=True):
            name = f"{shape}, {what}: {target.side} / {target.other}"
            yield Finding(what=name, value=ours / theirs, unit="×", least=least)


def _share(pace: Pace, bandwidth: float) -> float:
    """Returns which part of `bandwidth` the steps of one request take."""
    return pace.weights * median(pace.one) / bandwidth


async def measure(shapes: Sequence[str], names: Sequence[str], effort: Effort) -> Report:
    rows: list[list[Cell]] = []
    findings: list[Finding] = []
    raw: dict[str, object] = {}
    notes: list[str] = []
    machine, reader = this_machine(), MemoryReader()
    for shape in shapes:
        paces, bandwidth = await asyncio.to_thread(compare, shape, names, effort, reader)
        for name, pace in paces.items():
            share = 100 * _share(pace, bandwidth) if pace.weights else None
            rows.append([f"{shape}, {name}", *pace.medians, pace.weights / 1e6 or None, share])
            raw[f"{shape}/{name}"] = pace
        findings += _findings(shape, paces, effort.many, bandwidth)
        notes.append(
            f"{shape}: the machine read {bandwidth / 1e9:.1f} GB/s of memory, the median of the rounds."
        )
    return Report(
        name="formats",
        title=f"Tokens/s by the format of weights; prefill of {effort.prompt} tokens",
        columns=["", "one", f"{effort.many}", "prefill", "MB", "read, %"],
        rows=rows,
        findings=findings,
        machine=machine,
        notes=notes,
        raw=raw,
    )


QUICK: Final = Effort(many=4, steps=2, prompt=100, rounds=1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=WANTED)
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    publish(asyncio.run(measure(options.shape, options.sides, Effort(rounds=options.rounds))))


if __name__ == "__main__":
    main()
