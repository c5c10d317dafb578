"""The way from logits to tokens. Every draw is a function of (key, index), so no batch and no engine changes
it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvloom.types.job import PromptRow, SampleRow
from kvloom.types.request import TokenLogprob


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """Draws ids [R] from logits [R, V], by inverting the cumulative distribution over tokens from most to
    least likely at u [R] float64, in [0, 1).

    Filters apply in the order temperature, top-k (0: none), top-p, min-p, each [R]. A row without a possible
    token gives any one: it must not fail its neighbours.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    probs = ((order.values - order.values[:, :1]) / temperature[:, None].clamp_min(1e-5)).softmax(-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    probs = probs.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    probs = probs.masked_fill(probs < min_p[:, None] * probs[:, :1], 0.0).double()
    total = probs.cumsum(-1)
    place = torch.searchsorted(total, u[:, None] * total[:, -1:], right=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1  # a draw at the very edge must not leave the kept tokens
    ids: Tensor = order.indices.gather(-1, torch.minimum(place, last).clamp_min(0))[:, 0]
    return ids


_GOLDEN = 0x9E3779B97F4A7C15


def uniform(keys: ArrayLike, indices: ArrayLike) -> NDArray[np.float64]:
    """Returns one number in [0, 1) for each (key, index), of shapes that broadcast: SplitMix64's finaliser
    (Steele, Lea and Flood, 2014) over the key's own stream, 53 bits of it."""
    with np.errstate(over="ignore"):
        index = np.asarray(indices, dtype=np.uint64) + np.uint64(1)
        z = _mix(np.asarray(keys, dtype=np.uint64)) + index * np.uint64(_GOLDEN)
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


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
    chosen = bent.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
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
    return logprobs(logits.float(), [row.token for row in rows], [row.top for row in rows]) if rows else []


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Takes logits [R, V] and returns the log-probability of tokens[r], and the tops[r] best, or as many as
    there are."""
    normal = logits.log_softmax(-1)
    own = normal.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = normal.topk(min(max(1, *tops), normal.shape[-1]), -1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(own[r], tuple(zip(ids[r][:top], values[r][:top], strict=True)))
        for r, top in enumerate(tops)
    ]


def _bend(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Applies penalties, bias and masks to the rows that have any."""
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
    """Draws ids [R] from logits [R, V], each at its row's number."""
    params = [row.params for row in rows]
    numbers = (
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.from_numpy(uniform([row.key for row in rows], [row.index for row in rows])),
    )
    return draw(logits, *(one.to(logits.device) for one in numbers))
