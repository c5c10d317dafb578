"""The way from logits to tokens. A draw's noise is a function of (key, index, token), so no batch and no
engine changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvloom.kernels import draw_reference
from kvloom.kernels.cpu.draw import draw as cpu_draw
from kvloom.kernels.draw_reference import streams
from kvloom.types.job import PromptRow, SampleRow
from kvloom.types.request import TokenLogprob

_NUMBERS_AT_ONCE: Final = 1 << 23  # of float32 logits that are normalised; a long prompt's may be many


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, stream: Tensor
) -> Tensor:
    """Draws ids [R] from logits [R, V] float32, as `draw_reference.draw` does, by the device's kernel if
    there is one."""
    if logits.stride(-1) != 1:  # as gathered from ranks
        logits = logits.contiguous()
    return _kernel_of(logits.device.type)(logits, temperature, top_k, top_p, min_p, stream)


@cache
def _kernel_of(device: str) -> Callable[..., Tensor]:
    """Returns the device's kernel, or the twin, which is right on any."""
    if device == "cpu":
        return cpu_draw
    if device == "cuda":
        from kvloom.kernels.cuda.draw import draw as cuda_draw  # noqa: PLC0415  (and with it Triton)

        return cuda_draw
    return draw_reference.draw


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[TokenLogprob | None]]:
    """Takes logits [R, V], one row a draw, and returns R token ids, and their log-probabilities if a row asks
    for them.

    Log-probabilities are the model's own: before penalties, bias, masks and temperature.
    """
    if all(row.params.plain and row.allowed is None for row in rows):
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens, [None] * len(rows)
    raw = logits.float()
    bent = _bend(raw, rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if len(drawn) == len(rows):
        tokens = _draw(bent, rows).tolist()
    else:
        chosen = bent.argmax(-1)
        if drawn:
            chosen[drawn] = _draw(bent[drawn], [rows[i] for i in drawn])
        tokens = chosen.tolist()
    reports: list[TokenLogprob | None] = [None] * len(rows)
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if wanted:
        tops = [rows[i].params.logprobs or 0 for i in wanted]
        for i, report in zip(wanted, logprobs(raw[wanted], [tokens[i] for i in wanted], tops), strict=True):
            reports[i] = report
    return tokens, reports


def prompt_logprobs(logits: Tensor, rows: Sequence[PromptRow]) -> list[TokenLogprob]:
    """Takes logits [R, V] after each row's token and returns the log-probability of the token that the prompt
    has next."""
    return logprobs(logits, [row.token for row in rows], [row.top for row in rows])


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Takes logits [R, V] and returns the log-probability of tokens[r], and those of the tops[r] best tokens,
    or of as many as there are."""
    rows = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
    parts = [slice(at, at + rows) for at in range(0, len(tokens), rows)]
    return [one for part in parts for one in _logprobs(logits[part].float(), tokens[part], tops[part])]


def _logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    normal = logits.log_softmax(-1)
    own = normal.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = normal.topk(min(max(1, *tops), normal.shape[-1]), -1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(own[r], tuple(zip(ids[r][:top], values[r][:top], strict=True)))
        for r, top in enumerate(tops)
    ]


def _bend(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Returns the logits with penalties, bias and masks applied to the rows that have any."""
    if not any(_bends(row) for row in rows):
        return raw
    bent = raw.clone()
    for i, row in enumerate(rows):
        params = row.params
        if params.penalised:
            _penalise(bent[i], row)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=bent.device)
            bent[i, ids] += torch.tensor(list(params.logit_bias.values()), device=bent.device)
        if row.allowed is not None:
            allowed = _unpack(row.allowed(), bent.shape[1]).to(bent.device)
            bent[i].masked_fill_(~allowed, float("-inf"))
        if row.index < params.min_tokens and params.stop_token_ids:
            longer = bent[i].clone()
            longer[list(params.stop_token_ids)] = float("-inf")
            if longer.max() > float("-inf"):  # a mask that leaves but a stop token has the last word
                bent[i] = longer
    return bent


def _bends(row: SampleRow) -> bool:
    params = row.params
    ends = row.index < params.min_tokens and params.stop_token_ids
    return bool(params.penalised or params.logit_bias or ends) or row.allowed is not None


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Changes logits [V] in place. Repetition is as in CTRL (Keskar et al., 2019) over prompt and output;
    presence and frequency are as OpenAI defines them, over the output. A token that comes often is given the
    same value as often."""
    params = row.params
    prompt, output = (torch.from_numpy(ids).to(logits.device) for ids in (row.prompt, row.output))
    penalty = params.repetition_penalty
    if penalty != 1.0:
        for ids, values in [(ids, logits[ids]) for ids in (prompt, output)]:  # once for a token of both
            logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = output.bincount()[output]
        logits[output] -= params.frequency_penalty * counts + params.presence_penalty


def _unpack(words: np.ndarray[tuple[int], np.dtype[np.uint32]], size: int) -> Tensor:
    """Returns a bit mask, lowest bit first, as booleans [size]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(size, words.size * 32))
    mask = torch.zeros(size, dtype=torch.bool)
    mask[: bits.size] = torch.from_numpy(bits).bool()
    return mask


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draws ids [R] from logits [R, V], each from its row's stream."""
    params = [row.params for row in rows]
    numbers = (
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.from_numpy(streams([row.key for row in rows], [row.index for row in rows])),
    )
    return draw(logits, *(one.to(logits.device) for one in numbers))
