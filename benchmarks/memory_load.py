"""Memory of a load: the most that a process holds while it loads a checkpoint, against what stays.

python -m benchmarks.memory_load [PATH …]. Each load is in a process of its own, which has loaded the demo
fleet's smallest model before, so that libraries and kernels do not count. Without paths: shape A in
bfloat16, held as float32 and as it is, and made into 8 and 4 bits. Mapped pages count as long as they are
resident, though other processes share them.

python -m benchmarks.memory_load --served [PATH …]. Memory of served fleets, one for each checkpoint or GGUF
file, after some requests: each page that any of a fleet's processes has resident, of libraries too, counted
once and split among those that share it, against the file and the pool. Other processes of the host have no
part in it. Without paths: Qwen3-0.6B's shape in Q8_0, Q4_0 and Q4_K_M.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from tools.make_gguf import Kind, make_gguf

from benchmarks.load import Load
from benchmarks.places import ROOT, checkpoint, quantized
from benchmarks.process import running
from benchmarks.procfs import PROC, command_line, descendants, shares
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import kvloom
from benchmarks.workload import burst
from kvloom.exec.checkpoint import open_checkpoint
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.kv.memory import return_free_memory
from kvloom.types.spec import Dtype, ModelSpec

WARM: Final = ROOT / "src" / "kvloom" / "demo" / "sums"
MOST: Final = 1.15
MOST_SERVED: Final = 600 * 10**6 / (1 << 20)  # MiB beyond file and pool
SERVED_POOL: Final = 64 << 20
SERVED_KINDS: Final[tuple[Kind, ...]] = ("q8_0", "q4_0", "q4_k_m")
PROCESSES: Final = ("supervisor", "forkserver", "engine", "gateway")
REQUESTS, OUTPUT = 8, 16
PATIENCE: Final = 300.0  # on a machine that others use, too
_BLOCK: Final = 1 << 14
_FORGET_PEAK: Final = "5"  # for /proc/PID/clear_refs


class LoadMemory(msgspec.Struct, frozen=True):
    """MiB beyond what the process held before."""

    peak: float
    stays: float
    private: float
    """Of what stays, pages of its own. The others are of mapped files."""

    @property
    def ratio(self) -> float:
        return self.peak / self.stays


def load(path: Path, dtype: Dtype) -> LoadMemory:
    """Loads a checkpoint in this process."""
    _load(WARM, dtype)
    return_free_memory()
    (PROC / "self" / "clear_refs").write_text(_FORGET_PEAK)
    before = _status()
    loaded = _load(path, dtype)
    peak = _status()["VmHWM"]
    return_free_memory()
    after = _status()
    assert loaded.module is not None
    rss, anonymous = (after[key] - before[key] for key in ("VmRSS", "RssAnon"))
    return LoadMemory(peak - before["VmRSS"], rss, anonymous)


async def measured(path: Path, dtype: Dtype) -> LoadMemory:
    """Loads a checkpoint in a process of its own."""
    command = (sys.executable, "-m", "benchmarks.memory_load", str(path), "--dtype", dtype, "--here")
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    told, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"loading {path} ended with {child.returncode}")
    return msgspec.json.decode(told, type=LoadMemory)


def _load(path: Path, dtype: Dtype) -> LoadedModel:
    return load_model(ModelSpec(name="m", path=str(path), dtype=dtype), _BLOCK, CPU)


def _status() -> dict[str, float]:
    """Returns the MiB in the kernel's table of this process."""
    lines = (line.split() for line in (PROC / "self" / "status").read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) / 1024 for words in lines if words[-1] == "kB"}


async def fleet(path: Path) -> dict[str, float]:
    """Serves a checkpoint, asks for something, and returns the MiB of each process by its name."""
    served = kvloom({"m": path}, SERVED_POOL)
    async with running(served.command, patience=PATIENCE) as server:
        outcomes, _ = await Load({"m": served.url}).drive(burst("m", REQUESTS, OUTPUT, 0))
        if errors := [outcome.error for outcome in outcomes if outcome.error]:
            raise RuntimeError(errors[0])
        found = dict[str, float]()
        for pid, size in shares([server.pid, *descendants(server.pid)]).items():
            words = command_line(pid).split()
            module = next((word for word in words if word.startswith("kvloom.")), words[0])
            name = "supervisor" if pid == server.pid else module.rpartition(".")[2].removesuffix("_process")
            found[name] = found.get(name, 0.0) + size
        return found


def served_file(kind: Kind) -> Path:
    """Returns Qwen3-0.6B's shape in a GGUF file of a kind, made on first use."""
    source = checkpoint("qwen3-0.6b", "bfloat16")
    made = source.with_name(f"qwen3-0.6b-made-{kind}.gguf")
    return made if made.exists() else make_gguf(source, made, kind)


async def measure_served(paths: Sequence[Path]) -> Report:
    machine = this_machine()
    files = [path.resolve() for path in paths] or [served_file(kind) for kind in SERVED_KINDS]
    found = {path: await fleet(path) for path in files}
    pool = SERVED_POOL / (1 << 20)
    return Report(
        name="memory-served",
        title="Memory of a served fleet (MiB)",
        columns=["", "file", "pool", *PROCESSES, "others", "sum"],
        rows=[
            [
                path.name,
                _size(path),
                pool,
                *(one.get(name, 0.0) for name in PROCESSES),
                sum(size for name, size in one.items() if name not in PROCESSES),
                sum(one.values()),
            ]
            for path, one in found.items()
        ],
        findings=[
            Finding(
                what=f"{path.name}: beyond file and pool",
                value=sum(one.values()) - _size(path) - pool,
                unit=" MiB",
                most=MOST_SERVED,
            )
            for path, one in found.items()
        ],
        machine=machine,
    )


async def measure(paths: Sequence[Path], dtype: Dtype) -> Report:
    machine = this_machine()
    wanted: list[tuple[str, Path, Dtype]] = [(path.name, path, dtype) for path in paths]
    if not wanted:
        wanted = [(f"A, {form}", checkpoint("A", "bfloat16"), form) for form in ("float32", "bfloat16")]
        wanted += [(f"A, int{bits}", quantized("A", bits), "auto") for bits in (8, 4)]
    found = {name: await measured(path, form) for name, path, form in wanted}
    return Report(
        name="memory-load",
        title="Memory of a load (MiB)",
        columns=["", "peak", "stays", "of its own", "file"],
        rows=[
            [name, found[name].peak, found[name].stays, found[name].private, _size(path)]
            for name, path, _ in wanted
        ],
        findings=[
            Finding(what=f"{name}: peak / what stays", value=one.ratio, unit="×", most=MOST)
            for name, one in found.items()
        ],
        machine=machine,
    )


def _size(path: Path) -> float:
    """Returns the MiB of a checkpoint's files of weights."""
    return sum(file.stat().st_size for file in open_checkpoint(str(path)).weights) / (1 << 20)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="checkpoints, or GGUF files")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--here", action="store_true", help="print what one load in this process takes")
    parser.add_argument("--served", action="store_true", help="measure served fleets")
    options = parser.parse_args()
    if options.served:
        publish(asyncio.run(measure_served(options.paths)))
    elif options.here:
        torch.set_num_threads(2)
        print(msgspec.json.encode(load(options.paths[0], options.dtype)).decode())
    else:
        publish(asyncio.run(measure(options.paths, options.dtype)))


if __name__ == "__main__":
    main()
