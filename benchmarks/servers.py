"""kvloom and vLLM as the benchmarks start them: each as its own documentation says, on all cores.

vLLM's `auto` binding keeps a core free for its scheduler, which on two cores leaves one to compute with; so
the cores are named. Its worker waits for its engine by spinning, which takes a core from computing, unless
both are one process. Which of VLLM_SETUPS is fastest is measured by benchmarks.peers --tune.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec.structs import asdict

from benchmarks.places import LOGS, ROOT, VLLM_VENV
from benchmarks.process import Command, free_port
from kvloom.types.spec import Policy, Slo

KVLOOM_PATIENCE = 120.0
VLLM_PATIENCE = 900.0  # it compiles
MAX_CONTEXT = 1024
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True)
class Served:
    """A command and the base URL at which its models will be."""

    command: Command
    url: str
    patience: float


def kvloom(
    models: Mapping[str, Path],
    kv_bytes: int,
    policy: Policy = "adbs",
    slos: Mapping[str, Slo] = MappingProxyType({}),
) -> Served:
    """slos: of the models that have one of their own."""
    port = free_port()
    config = LOGS / f"kvloom-{policy}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        name: {"path": str(path)} | ({"slo": asdict(slos[name])} if name in slos else {})
        for name, path in models.items()
    }
    config.write_bytes(msgspec.yaml.encode({"models": settings}))
    argv = [sys.executable, "-m", "kvloom.cli", "serve", str(config), "--port", str(port)]
    argv += ["--kv-memory", f"{kv_bytes >> 20}MiB", "--policy", policy]
    url = f"http://127.0.0.1:{port}"
    command = Command(f"kvloom {policy}", argv, {}, f"{url}/health", LOGS / f"kvloom-{policy}.log")
    return Served(command, url, KVLOOM_PATIENCE)


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """A way to set vLLM up on this machine's cores. iomp: with Intel's OpenMP preloaded, which came with
    its own dependencies, as its documentation advises."""

    env: Mapping[str, str]
    flags: tuple[str, ...] = ()
    iomp: bool = False


def _cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def _threads(count: int) -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(count)}


_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}  # idle threads sleep at once: kinder where servers share the cores
# its worker then lives in its engine's process: no loop that waits for messages by spinning on a core
_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

VLLM_SETUPS: dict[str, VllmSetup] = {
    "bound": VllmSetup({"VLLM_CPU_OMP_THREADS_BIND": _cores()}),
    "bound-iomp": VllmSetup({"VLLM_CPU_OMP_THREADS_BIND": _cores()}, iomp=True),
    "free": VllmSetup(_threads(len(os.sched_getaffinity(0)))),
    "free-iomp": VllmSetup(_threads(len(os.sched_getaffinity(0))), iomp=True),
    "one-process": VllmSetup({**_ONE_PROCESS, **_threads(len(os.sched_getaffinity(0)))}),
    "one-process-iomp": VllmSetup({**_ONE_PROCESS, **_threads(len(os.sched_getaffinity(0)))}, iomp=True),
    "one-process-passive": VllmSetup(
        {**_ONE_PROCESS, **_threads(len(os.sched_getaffinity(0))), **_PASSIVE},
    ),
    "one-process-one-thread": VllmSetup({**_ONE_PROCESS, **_threads(1)}),
    "bound-passive": VllmSetup({"VLLM_CPU_OMP_THREADS_BIND": _cores(), **_PASSIVE}),
    "free-passive": VllmSetup({**_threads(len(os.sched_getaffinity(0))), **_PASSIVE}),
    "one-thread": VllmSetup(_threads(1)),
    "auto": VllmSetup({}),
    "eager": VllmSetup({"VLLM_CPU_OMP_THREADS_BIND": _cores()}, ("--enforce-eager",)),
    "eager-one-thread": VllmSetup(_threads(1), ("--enforce-eager",)),
}
AS_IT_COMES, BEST_SETUP = "auto", "one-process"


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM in the venv that benchmarks.peers makes."""

    venv: Path = VLLM_VENV
    setup: str = BEST_SETUP
    dtype: str = "float32"

    def serve(self, name: str, path: Path, kv_bytes: int) -> Served:
        """One model; everything not named here is as vLLM has it by default."""
        setup = VLLM_SETUPS[self.setup]
        port = free_port()
        argv = [str(self.venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(path), "--served-model-name", name, "--dtype", self.dtype]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(kv_bytes)]
        argv += ["--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(MAX_RUNNING)]
        argv += ["--disable-log-stats", "--disable-uvicorn-access-log", *setup.flags]
        url = f"http://127.0.0.1:{port}"
        log = LOGS / f"vllm-{self.setup}-{name}.log"
        command = Command(f"vllm {name}", argv, self._env(setup), f"{url}/health", log)
        return Served(command, url, VLLM_PATIENCE)

    def _env(self, setup: VllmSetup) -> dict[str, str]:
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
            "PYTHONWARNINGS": "ignore",
            **setup.env,
        }
        if setup.iomp:
            env["LD_PRELOAD"] = str(self.venv / "lib" / "libiomp5.so")
        return env
