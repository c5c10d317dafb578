"""What the code asks of cuda-bindings stands in the oldest and in the newest ones that it allows."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.bindings import AGES, Age, bindings

ROOT = Path(__file__).parents[2]

CHILD = """
import json, sys
import torch
from cuda.bindings import driver as api
from kvloom.exec.cuda.granules import Granules
from kvloom.kernels.driver import read_struct, write_struct

def parameters(call):
    inner, depth, found = call.__doc__.partition("\\n")[0].partition("(")[2].rpartition(")")[0], 0, 1
    for letter in inner:
        depth += (letter in "[(") - (letter in "])")
        found += letter == "," and not depth
    return found if inner else 0

asked, wrong = json.loads(sys.argv[1]), []
for name, count in asked["calls"]:
    call = getattr(api, name, None)
    if call is None or parameters(call) != count:
        wrong.append(f"{name} of {count}: {call and call.__doc__.splitlines()[0]}")
for path in asked["names"]:
    found = api
    for name in path:
        found = getattr(found, name, None)
    if found is None:
        wrong.append(".".join(path))
for kind in ("CUdeviceptr", "CUstream", "CUcontext"):
    int(getattr(api, kind)())
int(api.CUdevResource().sm.smCount)
handle, content = api.CUipcMemHandle(), bytes(range(64))
write_struct(handle, content)
if read_struct(handle, 64) != content:
    wrong.append("CUipcMemHandle")

class Told:
    def __init__(self):
        self.api, self.told = api, []
    def enter(self, index):
        pass
    def __call__(self, name, *arguments):
        self.told.append((name, *arguments))
        return 1 << 21

driver = Told()
granules = Granules(driver, torch.device("cuda", 3), 24 << 10)
granules.create(1)
granules.supply(granules.reserve(1), [0])
for name, *arguments in driver.told:
    for one in (*arguments, *(arguments[2] if name == "cuMemSetAccess" else ())):
        where = getattr(one, "location", None)
        if where is not None and (where.id, int(where.type)) != (3, 1):
            wrong.append(f"{name}: {where}")
kind, access = driver.told[1][2], driver.told[-1][3][0]
if (granules.size, int(kind.type), int(access.flags)) != (6 << 20, 1, 3):
    wrong.append("Granules")
print(json.dumps(wrong))
"""


@cache
def _asked() -> tuple[set[tuple[str, int]], set[tuple[str, ...]]]:
    """The driver's calls in the source with the number of their arguments, and its types and constants."""
    calls: set[tuple[str, int]] = set()
    names: set[tuple[str, ...]] = set()
    for file in (*ROOT.glob("src/kvloom/**/*.py"), *ROOT.glob("tools/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(args=[ast.Constant(value=str(name)), *more]) if re.match(r"cu[A-Z]\w+$", name):
                    calls.add((name, len(more)))
                case ast.Attribute():
                    path = tuple(_path(node))
                    if "api" in path and path[-1].startswith("CU"):
                        names.add(path[path.index("api") + 1 :])
    return calls, names


def _path(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield from _path(node.value)
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


@pytest.mark.parametrize("age", AGES)
def test_what_the_code_asks_of_the_driver_is_there(age: Age) -> None:
    """It needs no GPU: the bindings are imported, and the driver is not called."""
    calls, names = _asked()
    assert {("cuIpcGetMemHandle", 1), ("cuGreenCtxCreate", 3)} <= calls
    assert {("cuMemMap", 5), ("cuMemSetAccess", 4), ("cuMemUnmap", 2)} <= calls
    assert {("cuStreamBeginCapture", 2), ("cuDeviceGetAttribute", 2)} <= calls
    assert ("CUipcMem_flags", "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS") in names
    asked = {"calls": sorted(calls), "names": sorted(names)}
    found = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)],
        env={"PYTHONPATH": f"{bindings(age)}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == []
