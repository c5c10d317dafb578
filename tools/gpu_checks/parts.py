"""The parts of the checks, each in a process of its own, with what runs in it one after the other.
`python -m tools.gpu_checks.parts PART FILE SECONDS` writes what one part finds to a file, for `make
gpu-check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from tools.gpu_checks.report import Checks

KV_BYTES: Final = 24 << 30


def executor(run: Checks) -> None:
    """One executor for all that is measured of it."""
    from tools.gpu_checks import models, partitions, peers, steps, weaving  # noqa: PLC0415

    from kvloom.exec.cuda.device import cuda_device, cut_green  # noqa: PLC0415
    from kvloom.exec.cuda.operations import triton_operations  # noqa: PLC0415

    run.check("ceilings", steps.ceilings)
    run.check("partitions", lambda: partitions.disjoint(cuda_device(0, cut_green, triton_operations())))
    ground = models.cuda_ground()
    run.check("a static split", lambda: partitions.disjoint_split(ground.device))
    loaded = models.make_models({"8B": models.LLAMA_8B}, ground)
    arena = ground.arena(KV_BYTES)
    made = models.executor_of(loaded, arena, ground, most_running=128, chunk=8192)
    given = steps.Jobs(made, 512), loaded["8B"]
    run.check("decode steps", lambda: steps.decode_steps(*given))
    run.check("long prefill", lambda: steps.long_prefill(*given))
    run.check("decode beside prefill", lambda: steps.beside(given[0]))
    run.check("64 requests", lambda: peers.ours(made))
    run.check("a mailbox between two sides", lambda: weaving.between_sides(ground.device))
    made.close()


def flash(run: Checks) -> None:
    from tools.gpu_checks import flash, models  # noqa: PLC0415

    from kvloom.exec.cuda.device import uncut  # noqa: PLC0415

    run.check("FlashAttention 3", lambda: flash.against_triton(models.cuda_ground(uncut)))


def several(run: Checks) -> None:
    from tools.gpu_checks import models, several  # noqa: PLC0415

    run.check("several models", lambda: several.several(models.cuda_ground()))


def moving(run: Checks) -> None:
    """Its engines are processes of their own."""
    from tools.gpu_checks.moving import moving  # noqa: PLC0415

    run.check("a request moves", moving)


def weaving(run: Checks) -> None:
    from tools.gpu_checks import models, weaving  # noqa: PLC0415

    from kvloom.transfer.cuda_ipc import CudaMemory  # noqa: PLC0415

    ground = models.cuda_ground()
    run.check("weaving", lambda: weaving.weaving(ground, CudaMemory(ground.device.torch)))


def transformers(run: Checks) -> None:
    from tools.gpu_checks import peers  # noqa: PLC0415

    theirs = peers.Theirs()
    for graphs, name in peers.THEIRS.items():
        run.check(name, lambda graphs=graphs: theirs.measure(graphs))  # type: ignore[misc]


def memory(run: Checks) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # it tells what is wrong before anything else is loaded
    from tools.gpu_checks import memory  # noqa: PLC0415

    run.check("memory between processes", memory.between_processes)
    run.check("memory over NIXL", lambda: memory.over_nixl(torch.device("cuda", 0)))


PARTS: Final[Mapping[str, Callable[[Checks], None]]] = {
    "executor": executor,
    "flash": flash,
    "several": several,
    "moving": moving,
    "weaving": weaving,
    "transformers": transformers,
    "memory": memory,
}


def main(part: str, file: str, seconds: str) -> None:
    PARTS[part](Checks(float(seconds), Path(file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
