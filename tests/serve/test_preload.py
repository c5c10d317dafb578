"""What the fork server imports, and what it must not do by that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvloom.config.config import DEMO
from kvloom.exec.huggingface import kept_names
from kvloom.serve.processes.prefork import SINGLE_THREADED

PROGRAM = f"""
import os, sys
from kvloom.serve.engine import ahead
steps = ahead()
hidden = {{"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton"}}
assert not hidden & set(sys.modules), hidden & set(sys.modules)
for step in steps:
    step()
import torch
assert not torch.cuda.is_initialized()
assert len(os.listdir("/proc/self/task")) == 1
from kvloom.types.spec import ModelSpec
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
before = set(sys.modules)
load_model(ModelSpec(name="sums", path="{DEMO}/sums"), 4096, CPU)
late = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not late & {{"sympy", "numba", "safetensors", "tokenizers", "huggingface_hub"}}, late
assert not hidden & set(sys.modules), hidden & set(sys.modules)
import torch._dynamo
assert torch._dynamo.disable(len) is not len and torch.distributed.is_available()
"""


def test_engines_find_all_that_they_need_and_no_compiler() -> None:
    """One thread is left, so that it can fork; whoever wants torch's compiler later gets the true one."""
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | SINGLE_THREADED, check=True, timeout=120)


NAMES = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from kvloom.exec import huggingface
print(sum("/transformers/models/" in path and path.endswith(".py") for path in opened))
"""


def test_transformers_reads_few_of_its_files() -> None:
    for _ in range(2):  # the first may be the first of all
        done = subprocess.run([sys.executable, "-c", NAMES], check=True, timeout=120, stdout=subprocess.PIPE)
    assert int(done.stdout) < 100


def test_names_that_are_kept_are_believed_as_long_as_the_folder_is_the_same(tmp_path: Path) -> None:
    file, folder, reads = tmp_path / "names", tmp_path / "transformers" / "models", list[Path]()
    folder.mkdir(parents=True)

    def read(path: Path) -> dict[str, set[str]]:
        reads.append(path)
        return {"llama": {"LlamaConfig"}}

    def named(path: Path, count: int) -> None:
        """It is read for the count-th time, if that is not the present one."""
        assert kept_names(read, file)(path) == {"llama": {"LlamaConfig"}}
        assert len(reads) == count

    named(folder, 1)
    named(folder, 1)
    named(folder / "__init__.py", 1)  # stands for its folder
    file.write_bytes(file.read_bytes()[:20])
    named(folder, 2)
    os.utime(folder, (1, 1))
    named(folder, 3)
    named(folder, 3)
    named(tmp_path, 4)  # of which nothing is kept
    file.unlink()
    file.mkdir()  # it cannot be written
    named(folder, 5)
