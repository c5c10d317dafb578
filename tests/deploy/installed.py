"""The wheel, built and installed in an environment that has what the wheel requires, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvloom

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = Path(kvloom.__path__[0])


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Runs a command that must succeed, and returns what it prints."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Returns an sdist and a wheel: those in $KVLOOM_DIST if it is set, or else what the sources at `root`
    make now."""
    if given := os.environ.get("KVLOOM_DIST"):
        folder = ROOT / given
    else:
        run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=root)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment in `folder`, and returns the folder of its packages. What the wheel requires is
    linked from the running environment, since torch alone takes minutes to install anew."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    metadata = zipfile.Path(wheel) / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    for required in _required(PathDistribution(metadata)):
        for file in required.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(str(required.locate_file(top)))
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    run(*pip, "install", "--quiet", "--no-index", wheel)
    return packages


def _required(first: Distribution) -> Iterator[Distribution]:
    """Yields what a distribution requires without its extras, and what that requires, and so on."""
    seen: set[tuple[str, str]] = set()
    wanted = [(first, "")]
    while wanted:
        asking, extra = wanted.pop()
        for one in map(Requirement, asking.requires or ()):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                found = distribution(one.name)
                for more in {"", *one.extras}:
                    if (key := (canonicalize_name(one.name), more)) not in seen:
                        seen.add(key)
                        wanted.append((found, more))
                        yield found


def copy_kernels(packages: Path) -> None:
    """Copies the kernels' machine code, which takes minutes to compile, from beside the sources. numba takes
    it if the kernel's own file has the same time and size."""
    stamps = SOURCE.glob("kernels/cpu/__pycache__/kernels-*")
    for code in [*SOURCE.glob("kernels/cpu/**/__pycache__/*.nb?"), *stamps]:
        target = packages / "kvloom" / code.relative_to(SOURCE)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(code, target)
    for source in SOURCE.glob("kernels/cpu/**/*.py"):
        there = packages / "kvloom" / source.relative_to(SOURCE)
        assert there.read_bytes() == source.read_bytes()
        times = source.stat()
        os.utime(there, ns=(times.st_atime_ns, times.st_mtime_ns))
