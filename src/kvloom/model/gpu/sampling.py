"""From logits on the device to tokens on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvloom.core.arrays import AnyArray
from kvloom.core.job import SampleRow
from kvloom.core.request import TokenLogprob
from kvloom.kernels.draw import draw
from kvloom.model.sampler import sample, uniform


@dataclass(frozen=True, slots=True)
class Draws:
    """What a job is to draw. arrays: [R] each, to be sent with its inputs, but uniform: [steps, R]. They are
    empty where the largest logit is all that anybody wants, and where the host has a say in it (penalties,
    masks, log-probabilities)."""

    rows: tuple[SampleRow, ...]
    greedy: bool
    arrays: dict[str, AnyArray]

    @classmethod
    def of(cls, rows: tuple[SampleRow, ...], steps: int = 1) -> Draws:
        if all(row.params.plain and row.allowed is None for row in rows):
            return cls(rows, True, {})
        if not all(_simple(row) for row in rows):
            return cls(rows, False, {})
        params = [row.params for row in rows]
        keys = np.asarray([row.key for row in rows], dtype=np.uint64)
        indices = np.asarray([row.index for row in rows]) + np.arange(steps)[:, None]
        numbers = {name: [getattr(one, name) for one in params] for name in ("temperature", "top_p", "min_p")}
        arrays: dict[str, AnyArray] = {
            **{name: np.asarray(values, dtype=np.float32) for name, values in numbers.items()},
            "top_k": np.asarray([one.top_k for one in params], dtype=np.int64),
            "uniform": uniform(keys, indices),
        }
        return cls(rows, False, arrays)

    @property
    def on_device(self) -> bool:
        """Whether the host has no say."""
        return self.greedy or bool(self.arrays)

    def take(
        self, logits: Tensor, sent: Mapping[str, Tensor], step: int = 0
    ) -> tuple[Tensor, Sequence[TokenLogprob | None]]:
        """logits [R, V] of a step, and the arrays on the device → ids [R] there, and what was asked for
        beside, if anything was. Waits for the device only where the host has a say."""
        if self.on_device:
            ids = logits.argmax(-1)
            if self.arrays:
                names = ("temperature", "top_k", "top_p", "min_p")
                numbers = [*(sent[name] for name in names), sent["uniform"][step]]
                drawn = draw(logits.float(), *numbers)
                ids = torch.where(sent["temperature"] > 0, drawn, ids)
            return ids, ()
        tokens, reports = sample(logits, self.rows)
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device), reports


def _simple(row: SampleRow) -> bool:
    """A draw from the logits as they are."""
    params = row.params
    bent = params.penalised or params.logit_bias or (params.min_tokens and params.stop_token_ids)
    return not bent and row.allowed is None and params.logprobs is None and params.guide is None
