"""K and V that one sequence sends to another's reserved pages are as good as computed there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import Geometry
from kvloom.types.job import Job, Phase, SampleRow
from kvloom.types.request import SamplingParams, TokenLogprob
from kvloom.types.spec import ModelSpec
from kvloom.types.transfer import BlockCopies, Transfer
from tests.checkpoints import make_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 250, 37)]
PARAMS = SamplingParams(max_tokens=1, seed=0, logprobs=5)


class WithinOneArena(Transfer):
    """A transfer whose peer is the same unit: what is put is copied at once. arena: [blocks, 2, T, D]."""

    def __init__(self, arena: Tensor, address: KVAddress) -> None:
        peer = Endpoint(unit="same", kind="modelled", where=b"")
        super().__init__(peer, address, address.begin, address.end)
        self.arena = arena

    def put(self, copies: BlockCopies) -> None:
        rows = zip(copies.own, copies.peer, copies.offsets, copies.counts, strict=True)
        for own, peer, offset, count in rows:
            self.arena[peer, :, offset : offset + count] = self.arena[own, :, offset : offset + count]

    async def arrived(self) -> None: ...

    def abandon(self) -> None: ...


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
    told to send. The last 5 of the others come one by one."""
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
    address = KVAddress(
        model="m",
        form=KVForm.of(cache.geometry, "float32"),
        begin=own,
        end=len(PROMPT),
        blocks=KVAddress.compress(cache.prepare_receive(receiver, len(PROMPT) - own)),
        ticket=Ticket(0, 1),
    )
    transfer = WithinOneArena(executor._views["m"], address)
    if cached > own:
        cache.sends.planned(sender, transfer, cached).put_all(cache.pages.map)
        transfer.advance(cached)
    cache.sends.mark(sender, transfer)
    with pytest.raises(ValueError, match="waits for"):
        cache.remove_sequence(receiver)
    last = max(cached, len(PROMPT) - 5)
    if last > cached:
        forward(executor, cache, sender, PROMPT[cached:last])
    for token in PROMPT[last:]:
        forward(executor, cache, sender, [token])
    cache.commit_receive(receiver, len(PROMPT) - own)
    assert cache.length(receiver) == len(PROMPT)
    there, here = (forward(executor, cache, sequence, [7, 8]) for sequence in (receiver, sender))
    assert [token for token, _ in there.top] == [token for token, _ in here.top]
    assert there.logprob == pytest.approx(here.logprob, abs=1e-5)
    for sequence in (sender, receiver):
        cache.remove_sequence(sequence)
    pool.check()
    executor.close()
    assert pool.free == pool.total


class Layers(Transfer):
    """A transfer that notes what is put. layers: those of the copies' blocks, which are their numbers."""

    def __init__(self, address: KVAddress) -> None:
        super().__init__(Endpoint(unit="there", kind="modelled", where=b""), address, 0, 1)
        self.layers: list[int] = []

    def put(self, copies: BlockCopies) -> None:
        self.layers += copies.own.tolist()

    async def arrived(self) -> None: ...

    def abandon(self) -> None: ...


def test_a_rank_sends_a_layer_when_all_ranks_have_written_it() -> None:
    """They have as soon as the first one is at the next layer, and all of it after the forward."""
    geometry = Geometry(layers=3, kv_heads=1, head_dim=16, itemsize=4, block_bytes=2048)
    pool = Pool(6, {"m": geometry}, max_sequences=2, max_tokens={"m": 16})
    cache = pool.caches["m"]
    cache.add_sequence(0)
    cache.add_sequence(1)
    blocks = KVAddress.compress(cache.prepare_receive(1, 1))
    form = KVForm.of(geometry, "float32")
    transfer = Layers(KVAddress(model="m", form=form, begin=0, end=1, blocks=blocks, ticket=Ticket(0, 1)))
    cache.sends.mark(0, transfer)
    plan = cache.begin_forward([0], [1])
    mine = plan.page_map[plan.tables[0, 0], :, 0].tolist()
    state = ForwardState(plan, torch.zeros(6, 2, 16, 16), behind=1)
    for layer in range(3):
        state.send(layer)
        assert transfer.layers == mine[:layer]
    state.send_rest()
    assert transfer.layers == mine
