"""An oracle whose K and V are rounded as the pool keeps them: transformers' own model, dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvloom.exec.attention import NAME, Scoring, attend_dense
from kvloom.kernels.reference import from_rows, to_rows


class _Rounding:
    """Stands in for the forward state."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        k, v = (from_rows(to_rows(x, self._dtype), x.shape[-1]).to(q.dtype) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, 0, scoring).transpose(0, 1)


class KeptOracle:
    """The model in float32 with K and V in `kv_dtype`. worst: the most that a token checked was short of the
    best."""

    def __init__(self, path: Path | str, kv_dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval().set_attn_implementation(NAME)
        self._state = _Rounding(getattr(torch, kv_dtype))
        self.worst = 0.0

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[L, V], after each of the tokens."""
        ids = torch.tensor([list(tokens)])
        places = torch.arange(ids.shape[1])[None]
        with torch.inference_mode():
            out: Tensor = self.model(
                input_ids=ids, position_ids=places, use_cache=False, kv=self._state
            ).logits[0]
        return out

    def check(self, prompt: Sequence[int], found: Sequence[int], tie: float) -> None:
        """Each token is the best after those before it, or as good but for `tie`, as a part of the spread of
        the logits."""
        rows = self.logits([*prompt, *found])[len(prompt) - 1 : -1]
        gaps = rows.max(-1).values - rows.gather(-1, torch.tensor(found)[:, None])[:, 0]
        short = float((gaps / rows.std(-1)).max())
        self.worst = max(self.worst, short)
        assert short <= tie, f"token {int(gaps.argmax())} is {short:.2e} of the spread short of the best"
