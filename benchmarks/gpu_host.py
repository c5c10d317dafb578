"""The host's work a job of the GPU's executor, for Llama-3-8B's shape, on a machine without a GPU.

python -m benchmarks.gpu_host. Weights, pool and inputs are tensors without memory, so products cost what
torch takes to ask for one, and kernels are launched by Triton's own binder and launcher over a stub of the
driver (tests/exec/cuda/stub), which does nothing. A recorded step is replayed by a call that does nothing.
CPU time of the whole process, threads included. So this is the work of Python, torch and Triton, and no
figure of a device: what CUDA's driver takes for a launch, a copy or a replay comes on top.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from statistics import median
from typing import Any, Final

import torch
from tests.exec.cuda.stub.running import ROOT, NoStub, environment
from tools.gpu_checks.models import LLAMA_8B, Ground, executor_of, make_models
from tools.gpu_checks.steps import Jobs

from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec import sampler
from kvloom.exec.cuda import executor as executing
from kvloom.exec.cuda.device import GpuDevice, HostStream, PartitionLane, Partitions
from kvloom.exec.cuda.graphs import DecodeSteps, PrefillSteps
from kvloom.exec.cuda.model import DevicePageMap
from kvloom.exec.cuda.operations import Operations, triton_operations
from kvloom.exec.cuda.prefill import Draws
from kvloom.exec.cuda.staging import Staging
from kvloom.kernels.cuda.draw import draw
from kvloom.types.job import Phase

ROWS, CONTEXT, SHORT, LONG, CHUNK, STEPS = 32, 1024, 512, 1024, 2048, 32
MULTIPROCESSORS: Final = 132
MOST_DECODE_MS, MOST_PREFILL_MS = 1.5, 6.0
POOL: Final = 16 << 30
_NOWHERE: Final = torch.device("meta")


class _Nothing:
    def replay(self) -> None: ...


class _NullStream(HostStream):
    """A stream whose recordings do nothing."""

    def record(self, work: Callable[[], None]) -> _Nothing:
        work()
        return _Nothing()


class _Watch:
    """Adds up the CPU time of the calls of functions that it wraps, nested ones counted for the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def wrap(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                self.seconds[what] += time.thread_time() - begin
                self.calls[what] += 1

        return timed

    def watch(self, what: str, holder: Any, name: str) -> None:
        setattr(holder, name, self.wrap(what, getattr(holder, name)))

    def watch_jobs(self) -> None:
        """Watches the parts of jobs of either kind."""
        self.watch("compose inputs", DecodeSteps, "arrays")
        self.watch("compose inputs", PrefillSteps, "arrays")
        self.watch("compose inputs", executing, "prefill_inputs")
        self.watch("page map, and sending", DevicePageMap, "refresh")
        self.watch("replay, or launches", DecodeSteps, "run")
        self.watch("replay, or launches", PrefillSteps, "run")
        self.watch("replay, or launches", executing, "run_prefill")
        self.watch("draw", Draws, "take")
        self.watch("read tokens", Staging, "fetch")

    def of(self, operations: Operations) -> Operations:
        """Watches the launches of each operation."""
        names = [one.name for one in fields(Operations) if one.name != "flash"]
        watched: dict[str, Any] = {name: self.wrap(name, getattr(operations, name)) for name in names}
        return replace(operations, **watched)


def _answer_for_device() -> None:
    """Lets tensors without memory be loaded, fused and drawn from. Comparisons of what a module computes
    hold, since nothing is computed: the first form that is tried is Llama's own. What torch would work out in
    Python for such tensors, and in C++ for a device's, is answered at once."""
    from tests.exec.cuda.stub.programs import take_gpu  # noqa: PLC0415 -- it needs the stub

    take_gpu()
    vars(sampler)["_kernel_of"] = lambda device: draw
    vars(torch)["allclose"] = lambda *_, **__: True
    ids = torch.zeros(1 << 10, dtype=torch.int64)

    def empty(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=like.dtype, device=_NOWHERE)

    def added(one: torch.Tensor, other: torch.Tensor, alpha: int = 1) -> torch.Tensor:
        return torch.empty(one.shape, dtype=one.dtype, device=_NOWHERE)

    answers: dict[str, Callable[..., Any]] = {
        "argmax": lambda logits, dim=None, keepdim=False: ids[: logits.shape[0]],
        "where.self": lambda which, one, other: max(other, one, key=torch.Tensor.dim),
        "_local_scalar_dense": lambda one: 1.0,
        "mm": lambda one, other: empty(one.shape[0], other.shape[1], one),
        "add.Tensor": added,
    }
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, answer in answers.items():
        library.impl(name, answer, "Meta")
    _KEPT.append(library)


_KEPT: list[Any] = []  # an operator's replacement lives as long as its library


def _jobs(layers: int, watch: _Watch | None = None) -> Jobs:
    operations = triton_operations()
    if watch is not None:
        operations = watch.of(operations)
    whole = PartitionLane(MULTIPROCESSORS, _NullStream())
    ground = Ground(GpuDevice(_NOWHERE, MULTIPROCESSORS, Partitions(whole, [])), operations, torch.bfloat16)
    shape = replace(LLAMA_8B, form=LLAMA_8B.form | {"num_hidden_layers": layers})
    executor = executor_of(
        make_models({"llama": shape}, ground), ground.arena(POOL), ground, most_running=ROWS, chunk=CHUNK
    )
    return Jobs(executor, ROWS)


def _milliseconds(
    jobs: Jobs, phase: Phase, ids: list[int], appends: int, times: int, steps: int
) -> list[float]:
    """CPU time of the process a step, of each of `times` jobs; the first two left out."""

    async def repeat() -> list[float]:
        found = []
        for _ in range(times + 2):
            with jobs.job(phase, MULTIPROCESSORS, ids, appends, steps) as job:
                begin = time.process_time()
                await jobs.executor.launch(job)
                found.append(1e3 * (time.process_time() - begin) / steps)
        return found[2:]

    return asyncio.run(repeat())


_KINDS: Final = (  # name, phase, sequences, tokens they have, tokens they append, steps
    ("decode, a job of one step", Phase.DECODE, ROWS, CONTEXT, 1, 1),
    (f"decode, a step of {STEPS}", Phase.DECODE, ROWS, CONTEXT, 1, STEPS),
    (f"prefill, {LONG} tokens, not recorded", Phase.PREFILL, 1, 0, LONG, 1),
    (f"prefill, {SHORT} tokens", Phase.PREFILL, 1, 0, SHORT, 1),
    (f"prefill, {CHUNK} tokens, a whole chunk", Phase.PREFILL, 1, 0, CHUNK, 1),
)


def _measure_here(layers: int, times: int) -> dict[str, Any]:
    """Measures in this process, over the stub. Returns medians of ms a step, and, from a second run whose
    parts are watched, ms and calls of these."""
    _answer_for_device()
    found: dict[str, Any] = {}
    for watch in (None, _Watch()):
        jobs = _jobs(layers, watch)
        if watch is not None:
            watch.watch_jobs()
        for name, phase, count, have, appends, steps in _KINDS:
            with jobs.sequences(count, have) as ids:
                if watch is not None:
                    watch.seconds.clear()
                    watch.calls.clear()
                each = _milliseconds(jobs, phase, ids, appends, times, steps)
            if watch is None:
                found[name] = {"ms": median(each)}
                continue
            made = (times + 2) * steps
            found[name]["watched"] = median(each)
            found[name]["parts"] = {
                part: [1e3 * one / made, watch.calls[part] / made] for part, one in watch.seconds.items()
            }
    return found


def measure(layers: int = 32, times: int = 20) -> Report:
    """Measures in a process of its own over the stub. Raises RuntimeError where that cannot be, or fails."""
    try:
        around = environment()
    except NoStub as error:
        raise RuntimeError(str(error)) from error
    command = [sys.executable, "-m", __spec__.name, "--here", "--layers", str(layers), "--times", str(times)]
    done = subprocess.run(command, env=around, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    rows: list[list[Cell]] = []
    for name, one in found.items():
        rows.append([name, one["ms"], None])
        rows += [[f"  {part}", ms, calls] for part, (ms, calls) in one["parts"].items()]
    first, *_, last = found
    return Report(
        name="gpu-host",
        title=f"Host work of the GPU's executor, Llama-3-8B's shape, {layers} layers (ms of CPU)",
        columns=["", "ms", "calls"],
        rows=rows,
        findings=[
            Finding(what=f"{first}, {ROWS} rows", value=found[first]["ms"], unit=" ms", most=MOST_DECODE_MS),
            Finding(what=last, value=found[last]["ms"], unit=" ms", most=MOST_PREFILL_MS),
        ],
        machine=this_machine(),
        notes=["Parts are of a second run, which watching makes slower. No figure of a device."],
        raw=found,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--here", action="store_true", help="in this process, which the stub's driver is for")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(_measure_here(options.layers, options.times)))
        return
    publish(measure(options.layers, options.times))


if __name__ == "__main__":
    main()
