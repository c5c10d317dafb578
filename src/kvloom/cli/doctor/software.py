"""Checks of what is installed: Python, kvloom's packages, torch, and what Triton builds with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from packaging.requirements import Requirement

from kvloom.cli.doctor.finding import Finding, Verdict

PROCESSOR: Final = "kvloom.kernels.processor"
SECONDS: Final = 120.0
EXTRAS: Final = {
    "cluster": "several hosts",
    "gpu": "GPUs",
    "otlp": "traces",
}
"""The extras that a user may want, and what each is for."""
WHERE: Final = "in kvloom's checkout"
"""The place to install kvloom from: it is not on PyPI yet."""
_COMPILERS: Final = ("gcc", "clang", "cc")


class Processor(Struct, frozen=True):
    """The answer of `kvloom.kernels.processor`."""

    torch: str
    cuda: str | None
    onednn: bool
    threads: int
    features: list[str]
    gpus: list[str]


def ask_processor() -> Processor | str:
    """Returns what torch and numba find, asked in a process of its own, or why that cannot be told."""
    command = [sys.executable, "-m", PROCESSOR]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())[:200]
    try:
        return msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Processor)
    except msgspec.MsgspecError:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return " ".join(last.split())[:200]


def check_python() -> Finding:
    """Finds the interpreter. A version that is too old cannot have installed kvloom."""
    return Finding("Python", f"{platform.python_version()} on {platform.machine()}, {platform.system()}")


def check_torch(processor: Processor | str, gpus: int) -> Iterator[Finding]:
    """Finds torch, its build, and the instructions that kernels may use. `gpus` are those that there are."""
    if isinstance(processor, str):
        right = "a torch that can be imported: `pip install --force-reinstall torch`"
        yield Finding("torch", f"cannot be used: {processor}", "problem", right)
        return
    build = f"CUDA {processor.cuda}" if processor.cuda else "CPU"
    lacks = "" if processor.onednn else ", without oneDNN"
    found = f"{processor.torch}, built for {build}{lacks}; {processor.threads} threads"
    if gpus and not processor.cuda:
        yield Finding("torch", found, "note", "GPUs want a build of torch for CUDA")
    elif not processor.onednn:
        yield Finding("torch", found, "note", "a build with oneDNN is quicker")
    else:
        yield Finding("torch", found)
    features = processor.features
    if platform.machine().lower() not in ("x86_64", "amd64"):
        yield Finding("instructions", platform.machine())
    elif "AVX-512" in features:
        lacking = [one for one in ("VNNI", "BF16", "AMX") if one not in features]
        told = ", ".join(features) + (f"; no {', '.join(lacking)}" if lacking else "")
        yield Finding("instructions", told)
    else:
        told = ", ".join(features) or "none that matter"
        yield Finding("instructions", told, "note", "AVX-512 makes CPU kernels about twice as wide")


def check_packages() -> Iterator[Finding]:
    """Compares the packages that are installed with those that kvloom names."""
    wanted = [Requirement(text) for text in metadata.requires("kvloom") or []]
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    unfit = list(filter(None, map(_unfit, needed)))
    fitting = f"{len(needed) - len(unfit)} of {len(needed)} as kvloom wants them"
    if unfit:
        told = f"{fitting}; {'; '.join(unfit)}"
        yield Finding("packages", told, "problem", f"`pip install .` {WHERE} brings them")
    else:
        yield Finding("packages", fitting)
    for extra, purpose in EXTRAS.items():
        more = [
            one
            for one in wanted
            if one.marker is not None
            and one.marker.evaluate({"extra": extra})
            and not one.marker.evaluate({"extra": ""})
        ]
        unfit = list(filter(None, map(_unfit, more)))
        if unfit:
            right = f"for {purpose}: `pip install '.[{extra}]'` {WHERE}"
            yield Finding(f"extra {extra}", "; ".join(unfit), "note", right)
        else:
            yield Finding(
                f"extra {extra}", ", ".join(f"{one.name} {metadata.version(one.name)}" for one in more)
            )


def _unfit(wanted: Requirement) -> str:
    """Returns what is wrong with an installed package; empty if nothing is."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"no {wanted.name}"
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"{wanted.name} {version}, not {wanted.specifier}"


def check_triton(gpus: int) -> Iterator[Finding]:
    """Finds the C compiler and Python's headers with which Triton builds what launches its kernels. Without a
    GPU nobody needs them."""
    verdict: Verdict = "problem" if gpus else "note"
    why = "GPUs need it" if gpus else "only GPUs need it"
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else _COMPILERS)), None)
    if compiler:
        yield Finding("C compiler", compiler)
    else:
        found = f"CC names {named}, which cannot be run" if named else "none"
        right = f"gcc or clang on the PATH, or in CC (Debian: apt install gcc libc6-dev); {why}"
        yield Finding("C compiler", found, verdict, right)
    headers = Path(sysconfig.get_paths()["include"])
    if (headers / "Python.h").exists():
        yield Finding("Python headers", str(headers))
    else:
        found = f"no Python.h in {headers}"
        yield Finding("Python headers", found, verdict, f"Debian: apt install python3-dev; {why}")
