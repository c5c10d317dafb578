"""Programs over the stub: `python -m tests.exec.cuda.stub.programs NAME` prints what one found, as JSON.

torch has no CUDA here. So tensors are the host's, which the stub takes for the device's, and what torch is
asked about its device is answered here; an operation launches its kernel, and then its twin computes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import sys
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvloom.exec.cuda.device import HostStream, cut_green, refuse_kernels
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import Operations, plain_operations, triton_operations
from kvloom.kernels.driver import Driver, DriverError
from kvloom.offload.cuda import require_lenders
from kvloom.transfer.cuda_ipc import CudaMemory
from kvloom.types.errors import ConfigError, KvloomError

HERE = torch.device("cpu", 0)
COUNT = 132
_stub = ctypes.CDLL("libcuda.so.1")
_stub.stub_notes.restype = ctypes.c_char_p
_current = threading.local()


class _Stream:
    """torch's, as far as lanes use it; what the driver knows by number is a green context's."""

    def __init__(self, number: Any, device: Any = None) -> None:
        self.cuda_stream = number if isinstance(number, int) else 0

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def _entered(stream: _Stream) -> Iterator[None]:
    before = getattr(_current, "stream", 0)
    _current.stream = stream.cuda_stream
    try:
        yield
    finally:
        _current.stream = before


def take_gpu() -> None:
    """Lets torch tell of an H100."""
    from triton.backends.nvidia.driver import CudaDriver  # noqa: PLC0415 -- it is not installed everywhere

    vars(torch.cuda).update(
        current_device=lambda: 0,
        get_device_capability=lambda *_: (9, 0),
        current_stream=lambda *_: SimpleNamespace(cuda_stream=getattr(_current, "stream", 0)),
        graph_pool_handle=lambda: (0, 0),
        stream=_entered,
        Stream=_Stream,
        ExternalStream=_Stream,
        Event=_Event,
    )
    vars(torch._C).pop("_cuda_getCurrentRawStream", None)
    CudaDriver.is_active = staticmethod(lambda: True)


def notes() -> list[str]:
    """What the stub was asked for since it was last asked for this."""
    found: bytes = _stub.stub_notes()
    return found.decode().splitlines()


def computing() -> Operations:
    """Each operation launches Triton's kernel, which does nothing, and then its twin computes."""
    kernels, twins = triton_operations(), plain_operations()

    def both(name: str) -> Callable[..., Any]:
        launch, compute = getattr(kernels, name), getattr(twins, name)

        def run(*given: Any, **named: Any) -> Any:
            launch(*given, **named)
            return compute(*given, **named)

        return run

    made: dict[str, Any] = {one.name: both(one.name) for one in fields(Operations) if one.name != "flash"}
    return Operations(**made | {"workspace": kernels.workspace})


def refusals() -> dict[str, str]:
    """What the user reads at a first launch on machines that lack something; the last one lacks nothing."""
    take_gpu()
    told: dict[str, str] = {}
    paths = sysconfig.get_paths

    def launch(name: str, operations: Operations, **environment: str) -> None:
        before = dict(os.environ)
        os.environ.update(environment)
        told[name] = ""
        try:
            refuse_kernels(HostStream(), HERE, operations)
        except ConfigError as error:
            told[name] = error.message
        finally:
            os.environ.clear()
            os.environ.update(before)

    operations = computing()
    os.environ.pop("CC", None)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = str(Path(empty) / "cache")
        launch("no compiler", operations, PATH=empty)
        launch("a compiler that is not there", operations, CC="/nowhere/cc")
        vars(sysconfig)["get_paths"] = lambda *given, **named: paths(*given, **named) | {"include": empty}
        launch("no headers", operations)
        vars(sysconfig)["get_paths"] = paths
        broken = Path(empty) / "cc"
        broken.write_text("#!/bin/sh\nexit 4\n")
        broken.chmod(0o755)
        launch("a compiler that fails", operations, CC=str(broken))
        launch("no cache", operations, TRITON_CACHE_DIR="/proc/nowhere")
        launch("no module", operations, STUB_FAIL="cuModuleLoadData")
        launch("wrong", triton_operations())
        launch("all is there", operations)
    return told


def partitions() -> dict[str, Any]:
    """What is asked of the driver for green contexts, and what becomes of those that do not work."""
    take_gpu()
    operations = computing()
    logged: list[str] = []
    handler = logging.Handler()
    vars(handler)["emit"] = lambda record: logged.append(record.getMessage())
    logging.getLogger("kvloom.exec.cuda.device").addHandler(handler)
    found: dict[str, Any] = {}
    for failing in (
        "",
        "cuGreenCtxCreate",
        "cuStreamBeginCapture_v2",
        "cuGraphLaunch",
        "cuDeviceGetDevResource",
    ):
        os.environ["STUB_FAIL"] = failing
        notes()
        logged.clear()
        pairs = [(first[0], second[0]) for first, second in cut_green(HERE, COUNT, operations)]
        found[failing] = {"pairs": pairs, "notes": notes(), "logged": list(logged)}
    return found


def memory() -> dict[str, Any]:
    """What is asked of the driver to share memory; on which device a tensor over a peer's memory would be,
    and whose memory is refused."""
    take_gpu()
    found: dict[str, Any] = {"taken": []}

    def refuse(_: Any, device: Any) -> None:
        """torch here has no CUDA, says so, and keeps what it was given for ever; this one lets go of it."""
        found["taken"].append(str(device))
        raise RuntimeError("no CUDA")

    shared = CudaMemory(HERE)
    bytes_ = torch.zeros(1 << 12, dtype=torch.uint8)
    notes()
    handle = shared.export(bytes_)
    vars(torch)["as_tensor"] = refuse
    for name, change in {
        "own": {},
        "another's": {"STUB_OWNER": "1", "STUB_PEERS": "1"},
        "out of reach": {"STUB_PEERS": "0"},
        "unknown": {"STUB_FAIL": "cuPointerGetAttribute"},
    }.items():
        os.environ.update(change)
        try:
            shared.map(handle)
        except KvloomError as error:
            found[name] = error.message
        gc.collect()
    found["notes"], found["base"] = notes(), f"{bytes_.data_ptr() & ~511:x}"
    driver = Driver()

    def without_context() -> None:
        try:
            driver("cuMemGetAddressRange", bytes_.data_ptr())
        except DriverError as error:
            found["another thread"] = str(error)

    thread = threading.Thread(target=without_context)
    thread.start()
    thread.join()
    return found


def lenders() -> dict[str, str]:
    """Whether a unit of the first GPU may borrow from units of that one, of the second one, or of both."""
    take_gpu()
    driver, told = Driver(), {}

    def ask(name: str, gpus: tuple[str, ...], **environment: str) -> None:
        os.environ.update({"STUB_FAIL": "", "STUB_PEERS": "0"} | environment)
        try:
            require_lenders(driver, HERE, gpus)
            told[name] = ""
        except ConfigError as error:
            told[name] = error.message

    ask("without MPS", ("cuda:0",))
    ask("MPS unknown", ("cuda",), STUB_FAIL="cuDeviceGetAttribute")
    ask("no access", ("cuda:1",))
    ask("no atomics", ("cuda:1",), STUB_PEERS="1")
    ask("access unknown", ("cuda:1",), STUB_FAIL="cuDeviceCanAccessPeer")
    ask("atomics unknown", ("cuda:1",), STUB_PEERS="2", STUB_FAIL="cuDeviceGetP2PAttribute")
    ask("no such GPU", ("cuda:7",), STUB_PEERS="2")
    ask("peers", ("cuda:1", "cuda:1"), STUB_PEERS="2")
    ask("peers and no MPS", ("cuda:1", "cuda:0"), STUB_PEERS="2")
    ask("peers and MPS", ("cuda:1", "cuda:0"), STUB_PEERS="2", STUB_MPS="1")
    return told


def serving() -> dict[str, Any]:
    """An engine's jobs over Triton's real binder: what is compiled after the start, and launched by a decode
    step."""
    from tests.checkpoints import make_checkpoint  # noqa: PLC0415
    from tests.engines import ask, body, spec_of  # noqa: PLC0415
    from tests.exec.cuda.devices import one_lane  # noqa: PLC0415
    from tests.exec.cuda.engines import running_executor  # noqa: PLC0415

    take_gpu()
    logging.disable()
    prompts = [[(11 * i + 3 * j) % 250 for j in range(7 + 9 * i)] for i in range(7)]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"logprobs": 2}, {"n": 2}]

    async def jobs(spec: Any, executor: Any) -> None:
        async with running_executor(spec, executor) as engine:
            asked = (body("m", one, max_tokens=9, **ways[i % 4]) for i, one in enumerate(prompts))
            await asyncio.gather(*(ask(engine, one) for one in asked))
            await ask(engine, body("m", [*prompts[-1], 1, 2, 3], max_tokens=3))  # a page is copied on write

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), "qwen3", num_hidden_layers=2)
        spec = spec_of({"m": path}, max_running=8)
        executor = load_executor(spec, one_lane(), computing())
        found["rehearsed"] = sorted({one.split()[1] for one in notes() if one.startswith("load ")})
        asyncio.run(jobs(spec, executor))
        later = notes()
        found["compiled later"] = [one for one in later if one.startswith("load ")]
        found["launched"] = Counter(one.split()[1] for one in later if one.startswith("launch "))
    return found


def launches() -> dict[str, Any]:
    """Launches each kernel that is served, on tensors without memory, by Triton's own binder and launcher."""
    from kvloom.kernels.cuda.compile import served  # noqa: PLC0415

    take_gpu()
    each = {launch.kernel.__name__: launch for _, launch in served()}
    names = []
    for name, launch in each.items():
        replace(launch, then=None).run()
        names.append(name)
    told = [one.split()[1] for one in notes() if one.startswith("launch ")]
    return {"kernels": names, "launched": told}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
