"""What the first minutes on a GPU ask of Triton, of cuda-bindings and of the driver: their real code, over a
driver without a GPU."""

from __future__ import annotations

import pytest

from tests.bindings import AGES, Age, bindings
from tests.exec.cuda.stub.running import run


def test_what_a_first_launch_lacks_is_told_in_one_line() -> None:
    told = run("refusals")
    assert told.pop("all is there") == ""
    words = {
        "no compiler": "builds its launcher with a C compiler, and there is none; gcc or clang on the PATH",
        "a compiler that is not there": "and CC names /nowhere/cc, which cannot be run",
        "no headers": "there is no Python.h in /",
        "a compiler that fails": "ended with 4 (see above); a C compiler with the C library's headers",
        "no cache": "Triton cannot use /proc/nowhere",
        "no module": "no kernel can be launched: RuntimeError: Triton Error [CUDA]",
        "wrong": "its kernels compute what is wrong",
    }
    assert told.keys() == words.keys()
    for name, wanted in words.items():
        assert wanted in told[name]
        assert told[name].startswith("device: ")
        assert "`device: cpu`, is right" in told[name]
        assert "\n" not in told[name]


@pytest.mark.parametrize("age", AGES)
def test_partitions_are_made_and_tried_or_plain_streams_take_their_place(age: Age) -> None:
    found = run("partitions", bindings(age))
    good = found.pop("")
    assert good["logged"] == []
    assert good["pairs"] == [[16, 116], [32, 100], [48, 84], [64, 68]]
    sides = [side for pair in good["pairs"] for side in pair]
    streams = [one for one in good["notes"] if one.startswith("stream ")]
    assert streams == [f"stream {i} of {side}" for i, side in enumerate(sides, 1)]
    for i in range(1, len(sides) + 1):  # live, recorded, and the recording done again
        assert [one for one in good["notes"] if one.endswith(f" on {i}")] == [
            *[f"launch _gated 16 on {i}"] * 2,
            f"replay 1 on {i}",
        ]
    for failing, one in found.items():
        assert one["pairs"] == [[66, 66]], failing
        (line,) = one["logged"]
        assert line.startswith("no green contexts, so jobs that run at the same time share all of ")
        assert failing.removesuffix("_v2") in line


@pytest.mark.parametrize("age", AGES)
def test_memory_is_shared_by_handles(age: Age) -> None:
    """A peer's is this device's to torch, whichever GPU's it is, if this one reaches it."""
    found = run("memory", bindings(age))
    assert found["taken"] == ["cpu:0"] * 2
    assert found["notes"] == [f"{what} {found['base']}" for what in ("export", *("map", "unmap") * 4)]
    for name in ("own", "another's"):
        assert found[name] == "the peer's memory cannot be taken as a tensor: no CUDA"
    assert found["out of reach"] == (
        "peer: its memory is cuda:1's, to which cpu:0 has no peer access; units of one GPU, or of two that "
        "NVLink joins, are right"
    )
    assert found["unknown"].startswith(
        "which GPU's the peer's memory is cannot be told: cuPointerGetAttribute"
    )
    assert found["another thread"] == "cuMemGetAddressRange: CUDA_ERROR_INVALID_CONTEXT"


@pytest.mark.parametrize("age", AGES)
def test_who_cannot_be_borrowed_from_is_told_before(age: Age) -> None:
    told = run("lenders", bindings(age))
    assert [name for name, why in told.items() if not why] == ["peers", "peers and MPS"]
    mps = "MPS before the fleet starts (nvidia-cuda-mps-control -d), or no `weave`, is right"
    words = {
        "without MPS": mps,
        "peers and no MPS": mps,
        "MPS unknown": "weave: whether MPS runs on cpu:0 cannot be told: cuDeviceGetAttribute: ",
        "no access": "memory of cuda:1, and cpu:0 has no peer access to it; two GPUs that NVLink joins",
        "no atomics": "memory of cuda:1, and cpu:0 reaches it without atomics; two GPUs that NVLink joins",
        "access unknown": "reaches the memory of cuda:1 cannot be told: cuDeviceCanAccessPeer: ",
        "atomics unknown": "memory of cuda:1 cannot be told: cuDeviceGetP2PAttribute: CUDA_ERROR",
        "no such GPU": "memory of cuda:7 cannot be told: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE",
    }
    for name, wanted in words.items():
        assert wanted in told[name]
        assert told[name].startswith("weave: ")
        assert "\n" not in told[name]


def test_no_kernel_is_compiled_after_the_rehearsal() -> None:
    """By Triton's own binder and compiler: of prompts and batches of several sizes, and a copy on write."""
    found = run("serving")
    assert {"_copy_blocks", "_decode", "_prefill"} <= set(found["rehearsed"])
    assert found["compiled later"] == []
    launched, layers = found["launched"], 2
    steps = launched["_write"] // layers
    assert launched["_write"] == launched["_rotate"] == launched["_gated"] == layers * steps
    assert launched["_norm"] == (4 * layers + 1) * steps  # two a layer, those of q and of k, and the last
    assert launched["_decode"] + launched["_prefill"] == layers * steps


def test_triton_launches_each_kernel_that_is_served() -> None:
    """No parameter has a name that Triton's binder keeps to itself, or a kind that its launcher refuses."""
    found = run("launches")
    assert {"_decode", "_draw", "_prefill", "_serve"} <= set(found["kernels"])
    assert found["launched"] == found["kernels"]
