"""Memory of a load: the most that a process holds while it loads a checkpoint, against what stays.

python -m benchmarks.memory_load [PATH …]. Each load is in a process of its own, which has loaded the demo
fleet's smallest model before, so that libraries and kernels do not count. Without paths: shape A in
bfloat16, held as float32 and as it is, and made into 8 and 4 bits. Mapped pages count as long as they are
resident, though other processes share them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from benchmarks.places import ROOT, checkpoint, quantized
from benchmarks.procfs import PROC
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.exec.checkpoint import open_checkpoint
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.cpu.memory import return_free_memory
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.types.spec import Dtype, ModelSpec

WARM: Final = ROOT / "src" / "kvloom" / "demo" / "sums"
MOST: Final = 1.15
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
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(2)
        print(msgspec.json.encode(load(options.paths[0], options.dtype)).decode())
    else:
        publish(asyncio.run(measure(options.paths, options.dtype)))


if __name__ == "__main__":
    main()
