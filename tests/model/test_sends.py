"""K and V that one sequence sends to another's reserved slots are as good as computed there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvloom.core.job import Job, Phase, SampleRow
from kvloom.core.request import TokenLogprob
from kvloom.core.sampling import SamplingParams
from kvloom.core.spec import ModelSpec
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.model.executor import TorchExecutor
from tests.checkpoints import make_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 250, 37)]
PARAMS = SamplingParams(max_tokens=1, seed=0, logprobs=5)


def forward(executor: TorchExecutor, cache: ModelCache, sequence: int, tokens: list[int]) -> TokenLogprob:
    """Append `tokens`; what comes next."""

    async def run() -> TokenLogprob:
        plan = cache.begin_forward([sequence], [len(tokens)])
        inputs = np.asarray(tokens, dtype=np.int64)
        sample = SampleRow(len(tokens) - 1, 0, 0, PARAMS)
        result = await executor.launch(Job("m", Phase.PREFILL, 1, plan, inputs, (sample,)))
        cache.end_forward(plan)
        found = result.logprobs[0]
        assert found is not None
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(("own", "cached"), [(0, 0), (0, 20), (0, 36), (16, 20), (5, 20), (5, 3)])
def test_sent_is_as_good_as_computed(own: int, cached: int, tmp_path: Path) -> None:
    """`own`: tokens that the receiver has computed itself; `cached`: those that the sender holds when it is
    told to send."""
    path = make_checkpoint(tmp_path, "qwen3")
    spec = ModelSpec(name="m", path=str(path))
    executor = TorchExecutor.load([spec], kv_bytes=1 << 20, block_bytes=2048, threads=1)
    pool = Pool(executor.blocks, executor.geometries, max_sequences=4, max_tokens={"m": 256})
    cache = pool.caches["m"]
    sender, receiver = 0, 1
    for sequence, count in ((sender, cached), (receiver, own)):
        cache.add_sequence(sequence)
        if count:
            forward(executor, cache, sequence, PROMPT[:count])
    address = cache.prepare_receive(receiver, len(PROMPT) - own)
    cache.mark_send(sender, own, address)
    with pytest.raises(ValueError, match="waits for"):
        cache.remove_sequence(receiver)
    forward(executor, cache, sender, PROMPT[cached:])
    cache.commit_receive(receiver)
    assert cache.length(receiver) == len(PROMPT)
    there, here = (forward(executor, cache, sequence, [7, 8]) for sequence in (receiver, sender))
    assert [token for token, _ in there.top] == [token for token, _ in here.top]
    assert there.logprob == pytest.approx(here.logprob, abs=1e-5)
    for sequence in (sender, receiver):
        cache.remove_sequence(sequence)
    pool.check()
    executor.close()
    assert pool.free == pool.total
