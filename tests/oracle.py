"""Law 2's oracle: transformers' own greedy generate on the stock model, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-5


class Oracle:
    """ties: how often a differing token was let pass because the oracle's two best logits lay within TIE of
    each other. Tests print it."""

    def __init__(self, path: Path | str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()
        self.ties = 0

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens after `prompt`, whatever they are."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[V] after the last of `tokens`."""
        with torch.inference_mode():
            out: torch.Tensor = self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[
                0, -1
            ]
        return out

    def check(self, prompt: Sequence[int], found: Sequence[int]) -> None:
        """`found` is what greedy decoding gives, up to the first tie."""
        expected = self.greedy(prompt, len(found))
        for i, (want, got) in enumerate(zip(expected, found, strict=True)):
            if want == got:
                continue
            logits = self.logits([*prompt, *expected[:i]])
            gap = float(logits[want] - logits[got])
            assert gap <= TIE, (
                f"token {i}: {got} where the oracle has {want}, {gap:.2e} better\n{expected}\n{found}"
            )
            self.ties += 1
            return

    def check_at_once(self, prompt: Sequence[int], found: Sequence[int]) -> None:
        """The same in one forward over the whole: each token is the best after those before it."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([[*prompt, *found]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        gaps = rows.max(-1).values - rows.gather(-1, torch.tensor(found)[:, None])[:, 0]
        assert float(gaps.max()) <= TIE, (
            f"token {int(gaps.argmax())} is {float(gaps.max()):.2e} short of the best"
        )
        self.ties += int((rows.argmax(-1) != torch.tensor(found)).sum())
