"""The cores on which the threads of a team may run."""

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
from numba import carray, types

from kvloom.kernels.cpu.memory import address_of, fetch_add
from kvloom.kernels.cpu.parallel import kernel

_WORD = 64  # bits of a mask that are set at once
_set_affinity = types.ExternalFunction(
    "sched_setaffinity", types.int32(types.int32, types.uint64, types.int64)
)


class _AffinityArguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("taken", "masks", "mask_bytes")]


@kernel(_AffinityArguments)
def _bind(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    _set_affinity(0, a.mask_bytes, a.masks + fetch_add(address_of(pointer), 1) * a.mask_bytes)


def bind_team(cores: Sequence[Iterable[int]]) -> None:
    """Lets each thread of the calling one's team of `len(cores)` run on one of these sets of cores alone. A
    thread whose set has no core that there is stays where it may be."""
    words = 1 + max(core for one in cores for core in one) // _WORD
    masks = np.zeros((len(cores), words), np.uint64)
    for mask, one in zip(masks, cores, strict=True):
        for core in one:
            mask[core // _WORD] |= np.uint64(1 << core % _WORD)
    _bind(_AffinityArguments(0, masks.ctypes.data, masks.strides[0]), len(cores))
