"""A served model's tokens and log-probabilities against transformers' own, in contexts of any length.

In float32 each token is the stock model's best. In half precision the log-probabilities of a prompt's tokens,
and of drawn ones, are as far from those of float32 arithmetic, over the same rounded weights, as the stock
model's own in that precision, and little further.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.types.request import SamplingParams, TokenLogprob
from kvloom.types.spec import Dtype, EngineSpec
from tests.checkpoints import VOCAB
from tests.engines import Answer, ask, body, spec_of
from tests.exec.cuda.engines import running_executor
from tests.oracle import TIE

MODEL = "m"
FURTHER = 1.5  # × the stock model's own error
FLOOR = 1e-4  # of an error, below which it is no matter whose is larger


class Stock:
    """transformers' own model on a device. rounded: its weights are those of another number format. chunk:
    tokens of a forward: all scores of a long context at once would not fit."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        rounded: torch.dtype | None = None,
        chunk: int = 1024,
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        if rounded is not None:
            model.to(rounded).to(dtype)
        self._model = model.eval().to(device)
        self._device = device
        self._chunk = chunk

    def logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """[tokens - first, V] float32, after each token from `first` on."""
        cache, found = DynamicCache(), []
        with torch.inference_mode():
            for at in range(0, len(tokens), self._chunk):
                ids = torch.tensor([tokens[at : at + self._chunk]], device=self._device)
                logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
                if at + self._chunk > first:
                    found.append(logits[max(0, first - at) :].float())
        return torch.cat(found)

    def logprobs(self, tokens: Sequence[int], first: int) -> Tensor:
        """[tokens - first] of the tokens from `first` on, which is at least 1."""
        rows = self.logits(tokens, first - 1)[:-1].log_softmax(-1)
        return rows.gather(-1, torch.tensor(tokens[first:], device=rows.device)[:, None])[:, 0]


@dataclass(frozen=True)
class Asked:
    """Prompts of unlike lengths, all at once, and how many tokens each is answered with."""

    prompts: list[list[int]]
    count: int

    @classmethod
    def of(cls, lengths: Sequence[int], count: int) -> Asked:
        rng = random.Random(len(lengths))
        return cls([[rng.randrange(VOCAB) for _ in range(length)] for length in lengths], count)


def spec(path: Path, dtype: Dtype, sizes: dict[str, int]) -> EngineSpec:
    """sizes: of EngineSpec's fields."""
    made = replace(spec_of({MODEL: path}), **sizes)
    return replace(made, models=tuple(replace(one, dtype=dtype) for one in made.models))


def serve(
    wanted: EngineSpec, executor: GpuExecutor, asked: Asked, logprobs: int | None = None
) -> list[Answer]:
    """logprobs: of prompts and answers, with so many alternatives."""
    params = SamplingParams(max_tokens=asked.count, seed=0, logprobs=logprobs, prompt_logprobs=logprobs)

    async def run() -> list[Answer]:
        async with running_executor(wanted, executor) as engine:
            bodies = [replace(body(MODEL, prompt), sampling=params) for prompt in asked.prompts]
            return await asyncio.gather(*(ask(engine, one) for one in bodies))

    return asyncio.run(run())


def check_tokens(stock: Stock, asked: Asked, answers: Sequence[Answer]) -> None:
    """Each is the best after those before it, up to ties."""
    for prompt, answer in zip(asked.prompts, answers, strict=True):
        found = answer.tokens[0]
        assert len(found) == asked.count
        rows = stock.logits([*prompt, *found], len(prompt) - 1)[:-1]
        drawn = torch.tensor(found, device=rows.device)[:, None]
        gaps = rows.max(-1).values - rows.gather(-1, drawn)[:, 0]
        worst = float(gaps.max())
        assert worst <= TIE, f"after {len(prompt)} tokens, token {int(gaps.argmax())}: {worst:.2e} short"


def check_logprobs(truth: Stock, half: Stock, asked: Asked, answers: Sequence[Answer]) -> None:
    """Of answers with the log-probabilities of prompts and tokens. truth: in float32; half: in the precision
    that was served."""
    for prompt, answer in zip(asked.prompts, answers, strict=True):
        assert answer.prompt is not None
        drawn = [one for one in answer.logprobs[0] if one is not None]
        assert (len(answer.prompt), len(drawn)) == (len(prompt) - 1, asked.count)
        whole = [*prompt, *answer.tokens[0]]
        exact, stock = (model.logprobs(whole, 1) for model in (truth, half))
        for what, ours, part in (
            ("prompt", answer.prompt, slice(0, len(prompt) - 1)),
            ("answer", drawn, slice(len(prompt) - 1, None)),
        ):
            if ours:
                _check_error(f"{what} of {len(prompt)} tokens", ours, exact[part], stock[part])


def _check_error(what: str, ours: Sequence[TokenLogprob], exact: Tensor, stock: Tensor) -> None:
    """By root mean squares; of few tokens their own luck counts too."""
    found = torch.tensor([one.logprob for one in ours], device=exact.device)
    error, own = ((one - exact).square().mean().sqrt().item() for one in (found, stock))
    luck = 1 + 3 / len(ours) ** 0.5
    most = max(FURTHER * luck * own, FLOOR)
    assert error <= most, f"{what}: {error:.2e} from float32, where the stock model's error is {own:.2e}"
