"""How good is it? Exact answers by teacher forcing, and greedy answers as text."""

from __future__ import annotations

from typing import Any

import torch
from tools.demo_fleet.batch import IGNORED, collate, encode
from tools.demo_fleet.sample import Message, Sample
from tools.demo_fleet.template import ASSISTANT


def _last_answer(tokenizer: Any, sample: Sample) -> tuple[list[int], list[int]]:
    ids, _ = encode(tokenizer, sample)
    start = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids(ASSISTANT))
    return ids, [IGNORED] * start + ids[start:]


@torch.inference_mode()
def wrong(model: Any, tokenizer: Any, samples: list[Sample], size: int = 256) -> list[Sample]:
    """Samples whose last answer greedy decoding would not give: some token is not the likeliest."""
    missed = []
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        ids, labels = collate([_last_answer(tokenizer, s) for s in chunk], tokenizer.pad_token_id)
        guess = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        right = ((guess == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all(dim=1)
        missed += [sample for sample, good in zip(chunk, right.tolist(), strict=True) if not good]
    return missed


def exact(model: Any, tokenizer: Any, samples: list[Sample], size: int = 256) -> float:
    """The share of samples answered to the letter."""
    return 1 - len(wrong(model, tokenizer, samples, size)) / len(samples)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, messages: list[Message], tools: Any = None, limit: int = 200) -> str:
    """The greedy answer, special tokens and all."""
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=limit)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))
