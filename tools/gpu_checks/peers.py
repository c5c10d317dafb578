"""Many requests at once: this engine's executor against transformers' own continuous batching.

Both answer as many others first, so that neither has its set-up (memory, recordings, kernels) in its time. A
time goes from when the first request was made to when the last one ended.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from tools.gpu_checks.models import LLAMA_8B, Shape, answered, make_module, running, spec_of
from tools.gpu_checks.report import Figure, Report
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.types.request import ModelCard, SamplingParams, StartGenerate

OURS: Final = "64 requests at once, kvloom's engine"
THEIRS: Final = {
    True: "64 requests at once, transformers' continuous batching with CUDA graphs",
    None: "64 requests at once, transformers' continuous batching by its own choice of graphs",
}
WANTED: Final = 3.0
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Burst:
    """prompt, output: tokens of each request."""

    requests: int = 64
    prompt: int = 256
    output: int = 64

    @property
    def tokens(self) -> int:
        return self.requests * self.output

    def prompts(self, turn: int, vocabulary: int) -> list[list[int]]:
        """Each turn has others, so that no prefix cache answers."""
        random = np.random.default_rng(turn)
        return [random.integers(vocabulary, size=self.prompt).tolist() for _ in range(self.requests)]

    def figure(self, name: str, seconds: float, note: str = "") -> Figure:
        """note: more of it."""
        return Figure(
            name=name, value=self.tokens / seconds, unit="tokens/s", note=f"{seconds:.2f} s, warm{note}"
        )


def ours(executor: GpuExecutor, burst: Burst | None = None) -> Iterator[Figure]:
    """With scheduling and accounting, without HTTP."""
    burst = burst or Burst()
    yield burst.figure(OURS, asyncio.run(_serve(executor, burst)))


class Theirs:
    """`generate_batch` over paged attention, as transformers sets it up, with a manager that stays."""

    def __init__(
        self, shape: Shape = LLAMA_8B, device: str = "cuda", burst: Burst | None = None, **options: Any
    ) -> None:
        """options: of its ContinuousBatchingConfig."""
        self._module: Any = make_module(shape, torch.device(device), torch.bfloat16, "sdpa")
        self._vocabulary: int = shape.form["vocab_size"]
        self._burst = burst or Burst()
        self._options = options

    def measure(self, graphs: bool | None) -> Iterator[Figure]:
        """graphs: whether CUDA graphs are asked for; None leaves it to transformers. Raises LookupError where
        this version keeps no manager, so that its set-up could not be left out."""
        if "persistent_manager" not in inspect.signature(self._module.generate_batch).parameters:
            raise LookupError("this transformers keeps no manager from call to call; 5.17 or newer is right")
        config = ContinuousBatchingConfig(use_cuda_graph=graphs, **self._options)
        try:
            self._answer(0, config)
            seconds = self._answer(1, config)
            yield self._burst.figure(THEIRS[graphs], seconds, self._told())
        finally:
            self._module.destroy_cached_continuous_batching_manager()
            gc.collect()

    def _answer(self, turn: int, config: ContinuousBatchingConfig) -> float:
        """Seconds, as requests tell them: a call starts and ends a thread besides. Not in inference mode,
        whose tensors that thread may not change."""
        burst = self._burst
        generation = GenerationConfig(
            max_new_tokens=burst.output, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = self._module.generate_batch(
            inputs=burst.prompts(turn, self._vocabulary),
            generation_config=generation,
            continuous_batching_config=config,
            persistent_manager=True,
        ).values()
        made = sum(len(one.generated_tokens) for one in found)
        assert made == burst.tokens, f"{made} tokens came, {burst.tokens} were asked for"
        return float(max(one.lifespan[1] for one in found) - min(one.created_time for one in found))

    def _told(self) -> str:
        """What was on."""
        chosen = self._module._cached_continuous_batching_manager.continuous_batching_config
        graphs, ahead = chosen.use_cuda_graph, chosen.use_async_batching
        return f"; graphs of mixed and of decode steps: {graphs}; asynchronous: {ahead}"


def against_transformers(report: Report) -> Iterator[Figure]:
    """Of what both have been measured to make; of transformers' ways the faster one. Raises LookupError where
    one has not been."""
    mine = report.figure(OURS)
    others = [figure for name in THEIRS.values() if (figure := report.figure(name)) is not None]
    if mine is None or not others:
        raise LookupError("one of the two has not been measured")
    other = max(others, key=lambda figure: figure.value)
    note = f"of {len(THEIRS)} ways that transformers has {len(others)} ran; against the faster one"
    yield Figure(
        name=f"{OURS} / transformers", value=mine.value / other.value, unit="×", least=WANTED, note=note
    )


async def _serve(executor: GpuExecutor, burst: Burst) -> float:
    spec = spec_of(executor, "adbs", max_running=2 * burst.requests, chunk=_CHUNK)
    async with running(executor, spec) as engine:
        [card] = executor.cards.values()
        await _answer(engine, card, burst, 0)
        return await _answer(engine, card, burst, 1)


async def _answer(engine: Engine, card: ModelCard, burst: Burst, turn: int) -> float:
    """Seconds."""
    params = SamplingParams(max_tokens=burst.output, seed=0)
    prompts = burst.prompts(turn, card.vocab_size)
    began = time.perf_counter()
    counts = await asyncio.gather(
        *(
            answered(
                engine, StartGenerate(model=card.name, request=f"{turn}-{i}", prompt=prompt, sampling=params)
            )
            for i, prompt in enumerate(prompts)
        )
    )
    seconds = time.perf_counter() - began
    assert sum(counts) == burst.tokens, f"{sum(counts)} tokens came, {burst.tokens} were asked for"
    return seconds
