"""The compiled check of a descriptor takes what the host's takes, and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kernels.cpu.offload_serve import check
from kvloom.offload.cpu.polling import Polling
from kvloom.offload.memory.lender import Task, TaskReceiver
from kvloom.types.errors import BadRequest
from tests.transfer.loans import GEOMETRY, HEADS, LENT, begin, borrowed, lender_here, memory_of

_QKV = np.ones((3, HEADS + 2 * GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)
_FIELDS = ["head", "lengths", "tables", "changed", "map"]
_NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 5, 6, 16, 17, 23, 24, 32, 33, 2**31 - 1])


def _next(host: TaskReceiver) -> Task | None:
    """None where it breaks a rule."""
    try:
        return host.next()
    except BadRequest:
        return None


@settings(max_examples=150)
@given(data=st.data())
def test_is_the_hosts_over_any_numbers(data: st.DataObject) -> None:
    with lender_here() as made:
        memory = memory_of(made)
        tokens = GEOMETRY.tokens_per_block
        polling = Polling(memory, made.arena, TaskReceiver(memory, LENT, tokens), torch.float32, lambda: 1)
        host, own = TaskReceiver(memory, LENT, tokens), polling._own
        loan = borrowed(made.lending.loan)
        for turn in range(2):
            lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=3))
            begin(loan, lengths, version=1 + turn)
            task = loan.tasks.post(0, _QKV[: len(lengths)], 1.0, 0, 0.0)
            for name in data.draw(st.lists(st.sampled_from(_FIELDS), max_size=2)):
                flat = getattr(memory, name).reshape(-1).view(np.int32)
                flat[data.draw(st.integers(0, min(12, flat.size) - 1))] = data.draw(_NUMBERS)
            iteration = int(memory.notes[0]["iteration"]) if turn == 0 else int(memory.notes[1]["iteration"])
            rows = check(polling.record.descriptor, iteration)
            found = _next(host)
            assert (found is None) == (rows != len(lengths))  # a task is over as many rows as its descriptor
            if found is None:
                return
            descriptor, width = found.descriptor, found.descriptor.tables.shape[1]
            assert rows == len(descriptor.lengths)
            np.testing.assert_array_equal(own.lengths[:rows], descriptor.lengths)
            used = np.arange(width) < -(-descriptor.lengths // tokens)[:, None]
            np.testing.assert_array_equal(own.tables[:rows, :width][used], descriptor.tables[used])
            np.testing.assert_array_equal(own.slot_page[:rows], descriptor.slot_page)
            np.testing.assert_array_equal(own.slot_offset[:rows], descriptor.slot_offset)
            np.testing.assert_array_equal(own.map, descriptor.map)
            memory.done.set(task)
            host.done = task
