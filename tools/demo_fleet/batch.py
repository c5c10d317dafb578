"""Samples as tensors: tokens and the labels to learn."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from tools.demo_fleet.recipe import Phase
from tools.demo_fleet.sample import Sample
from tools.demo_fleet.template import ASSISTANT, END

IGNORED = -100
POOL = 8  # batches drawn at once and sorted by length, so that little is padded


def encode(tokenizer: Any, sample: Sample) -> tuple[list[int], list[int]]:
    """Token ids and labels; of a chat only the assistant's turns are learnt."""
    if not sample.messages:
        ids: list[int] = tokenizer(sample.text)["input_ids"] + [tokenizer.eos_token_id]
        return ids, ids
    text = tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    opens, closes = tokenizer.convert_tokens_to_ids([ASSISTANT, END])
    labels, answering = [], False
    for token in ids:
        labels.append(token if answering else IGNORED)
        if token in (opens, closes):
            answering = token == opens
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right: with a causal mask the real tokens do not see it."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([r + [pad] * (width - len(r)) for r, _ in rows])
    labels = torch.tensor([r + [IGNORED] * (width - len(r)) for _, r in rows])
    return ids, labels


class Batches:
    """An endless, seeded stream of batches of similar lengths."""

    def __init__(self, phase: Phase, tokenizer: Any, seed: int) -> None:
        self.phase, self.tokenizer, self.rng = phase, tokenizer, Random(seed)
        self.ready: list[tuple[torch.Tensor, torch.Tensor]] = []

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.ready:
            self._refill()
        return self.ready.pop()

    def _refill(self) -> None:
        size = self.phase.batch
        rows = [encode(self.tokenizer, self.phase.draw(self.rng)) for _ in range(size * POOL)]
        rows.sort(key=lambda row: len(row[0]))
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.rng.shuffle(chunks)
        self.ready = [collate(chunk, self.tokenizer.pad_token_id) for chunk in chunks]
