"""Checks of the machine and of the limits under which this process runs."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvloom.cli.doctor.finding import Finding, Verdict
from kvloom.cli.doctor.software import Processor
from kvloom.config.config import Config
from kvloom.config.machine import Machine
from kvloom.kv.memory import CGROUP
from kvloom.serve.machine import OPEN_FILES
from kvloom.types.numbers import show_size

LEAST_MEMORY: Final = 1 << 30
LEAST_SHARED: Final = 1 << 30
FEW_FILES: Final = 1 << 12
NODES: Final = Path("/sys/devices/system/node")
SHARED: Final = Path("/dev/shm")
DRIVER: Final = Path("/sys/module/nvidia/version")


def check_cores(machine: Machine) -> Iterator[Finding]:
    """Finds the cores, the time that a container may have of them, and the nodes of a NUMA machine."""
    found = f"{machine.cores} of {os.cpu_count() or machine.cores} for this process"
    if machine.auto_cores < machine.cores:
        found += f"; its cgroup allows the time of {machine.quota:g}"
        found += f", and `threads: auto` takes {machine.auto_cores}"
    yield Finding("cores", found)
    nodes = len(list(NODES.glob("node[0-9]*")))
    if nodes > 1:
        right = "if one node's cores suffice: `numactl --cpunodebind=0 --membind=0 kvloom serve`"
        yield Finding("NUMA", f"{nodes} nodes, to which no process is bound", "note", right)


def check_memory(machine: Machine) -> Iterator[Finding]:
    """Finds the memory that is free, with the limit of a container, and the shared memory."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{show_size(machine.memory)} free of {show_size(whole)}"
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        found += f", of which the cgroup allows {show_size(limit)}"
    if machine.memory < LEAST_MEMORY:
        yield Finding("memory", found, "problem", f"{show_size(LEAST_MEMORY)} free for small models, or more")
    else:
        yield Finding("memory", found)
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError:
        yield Finding("shared memory", f"no {SHARED}", "note", f"{SHARED}, for Ray and for ranks on GPUs")
        return
    if free < LEAST_SHARED:
        right = f"{show_size(LEAST_SHARED)} for Ray and for ranks on GPUs (docker run --shm-size=1g)"
        yield Finding("shared memory", f"{show_size(free)} free in {SHARED}", "note", right)
    else:
        yield Finding("shared memory", f"{show_size(free)} free in {SHARED}")


def check_limits() -> Iterator[Finding]:
    """Finds how many files may be open, up to which `kvloom serve` raises the limit by itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if most < FEW_FILES:
        right = f"{OPEN_FILES} (ulimit -Hn, LimitNOFILE=), since each stream has a connection on both sides"
        yield Finding("open files", f"{most} at most", "note", right)
    else:
        yield Finding("open files", f"{min(most, OPEN_FILES)} at most")


def check_folders() -> Iterator[Finding]:
    """Finds the folder for sockets, and the one in which weights sleep."""
    sockets, sleep = Path(tempfile.gettempdir()), Path(Config.model_fields["sleep_dir"].default)
    for what, folder, variable in (
        ("sockets' folder", sockets, "TMPDIR"),
        ("sleep_dir", sleep, "sleep_dir in the config"),
    ):
        if os.access(folder, os.W_OK | os.X_OK):
            yield Finding(what, f"{folder}, {show_size(shutil.disk_usage(folder).free)} free")
        else:
            verdict: Verdict = "problem" if folder == sockets else "note"
            yield Finding(what, f"{folder} cannot be written", verdict, f"another folder in {variable}")


def check_port() -> Finding:
    """Finds whether `kvloom serve` can listen at its usual address."""
    host, port = Config.model_fields["host"].default, Config.model_fields["port"].default
    try:
        with socket.create_server((host, port)):
            return Finding(f"port {port}", f"free at {host}")
    except OSError as error:
        problem = os.strerror(error.errno).lower() if error.errno else str(error)
        return Finding(f"port {port}", f"{problem} at {host}", "note", "`kvloom serve --port` takes another")


def check_gpus(machine: Machine, processor: Processor | str) -> Finding:
    """Finds NVIDIA's GPUs, their driver, and whether torch can use them."""
    if not machine.gpus:
        return Finding("GPUs", "none; models run on the cores")
    driver = "a driver"
    with suppress(OSError):
        driver = f"driver {DRIVER.read_text().strip()}"
    seen = [] if isinstance(processor, str) else processor.gpus
    if len(seen) < machine.gpus:
        right = "a torch for CUDA that this driver is new enough for; `nvidia-smi` tells for which it is"
        return Finding("GPUs", f"{machine.gpus}, {driver}; torch can use {len(seen)}", "problem", right)
    return Finding("GPUs", f"{', '.join(seen)}; {driver}")
