"""Models that make vectors: texts run in one row without padding through transformers' own layers, and each
text's last hidden states become its vector.

Where a text's positions begin, and which of its states a head reads, is not taken from an architecture's
name: the loader tries, and keeps what agrees with the stock model's own answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from kvloom.exec.attention import Scoring, attend_dense, padded_rows, passed_on
from kvloom.exec.huggingface import AttentionInterface
from kvloom.exec.pooling.files import Mode, Pooling
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64

NAME: Final = "kvloom_texts"
_PROBE: Final = (9, 5)  # tokens of the texts by which a model is proven
_HEADS: Final[tuple[Mode, ...]] = ("cls", "lasttoken", "mean")  # what heads that classify read


def texts_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Takes query [1, Hq, N, D], key and value [1, Hkv, N, D] of texts one after the other, and returns
    [1, N, Hq, D]. Each text attends to itself alone. `texts` has the edges of the texts."""
    edges: list[int] = passed_on("texts", attention_mask, kwargs)
    asked = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    form = Scoring(scale, sliding_window or 0, softcap or 0.0)
    out = torch.empty(query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device)
    for begin, end in pairwise(edges):
        q, k, v = (x[0, :, begin:end] for x in (query, key, value))
        attended = attend_dense(q, k, v, 0, form) if causal else _attend_both_ways(q, k, v, form)
        out[begin:end] = attended.transpose(0, 1)
    return out[None], None


def _attend_both_ways(q: Tensor, k: Tensor, v: Tensor, form: Scoring) -> Tensor:
    """Computes attention of q [Hq, n, D] over k and v [Hkv, n, D] of one text, on both sides of each query
    as far as the window goes."""
    if form.softcap:
        raise ConfigError("its attention looks both ways and bends scores, which kvloom does not have")
    n, seen = q.shape[1], None
    if form.window and form.window < n:
        at = torch.arange(n, device=q.device)
        seen = (at[:, None] - at).abs() < form.window
    grouped = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], seen, scale=form.scale, enable_gqa=grouped
    )[0]


AttentionInterface.register(NAME, texts_attention)


def pool(states: Tensor, edges: list[int], mode: Mode) -> Tensor:
    """Returns the vectors [B, H] that `mode` makes of the states [N, H] of texts with these edges."""
    if mode == "cls":
        return states[edges[:-1]]
    if mode == "lasttoken":
        return states[[edge - 1 for edge in edges[1:]]]
    return torch.stack([_POOLERS[mode](states[begin:end].float()) for begin, end in pairwise(edges)])


def _weighted(states: Tensor) -> Tensor:
    weights = torch.arange(1, len(states) + 1, dtype=states.dtype, device=states.device)
    return (states * weights[:, None]).sum(0) / weights.sum()


_POOLERS: Final[dict[Mode, Callable[[Tensor], Tensor]]] = {
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted,
}


@dataclass
class _Output(BaseModelOutputWithPooling):  # type: ignore[misc]
    """The output of a model below a head, with the fields that decoders' heads pass on."""

    cache: None = None


class _States(nn.Module):
    """Stands in a classifier in the place of the model below its head: it gives the states that it is
    given."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._pooler = getattr(body, "pooler", None)

    def forward(self, input_ids: Any = None, *, inputs_embeds: Tensor, **_: Any) -> Any:
        pooled = None if self._pooler is None else self._pooler(inputs_embeds)
        return _Output(last_hidden_state=inputs_embeds, pooler_output=pooled)


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model that makes a vector of each text."""

    body: Any
    """Transformers' module up to the last hidden states."""
    head: Any
    """Transformers' classifier over `_States`; None if the model has no head."""
    pooling: Pooling
    mode: Mode
    first: int
    """The position of a text's first token."""
    types: bool
    """Whether the model is told which tokens are of the second text of a pair."""

    def __call__(self, tokens: I64, lengths: I64, pairs: tuple[int, ...]) -> Tensor:
        """Takes the tokens [N] of texts, the length [B] of each and the position at which the second text of
        a pair begins in it, and returns vectors [B, size] in float32."""
        texts, short = len(lengths), padded_rows(tokens.size) - tokens.size
        if short:  # one more text, of which nothing is read
            tokens, lengths = np.pad(tokens, (0, short), "edge"), np.append(lengths, short)
            pairs = (*pairs, 0)
        edges: list[int] = np.concatenate(([0], lengths.cumsum())).tolist()
        inside = np.arange(tokens.size) - np.repeat(edges[:-1], lengths)
        inside[tokens.size - short :] = 0  # it may be longer than the model has positions
        kinds = {}
        if self.types:
            begin = np.repeat(
                [pair or int(length) for pair, length in zip(pairs, lengths, strict=True)], lengths
            )
            kinds["token_type_ids"] = torch.from_numpy((inside >= begin).astype(np.int64))[None]
        states = self.body(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=torch.from_numpy(inside + self.first)[None],
            texts=edges,
            **kinds,
            **_no_cache(self.body),
        ).last_hidden_state[0]
        vectors = pool(states, edges[: texts + 1], self.mode)
        if self.head is not None:
            ones = torch.ones(len(vectors), 1, dtype=torch.int64)
            vectors = self.head(inputs_embeds=vectors[:, None].to(states.dtype), attention_mask=ones).logits
        vectors = vectors.float()
        if self.pooling.sigmoid:
            vectors = vectors.sigmoid()
        return F.normalize(vectors, dim=-1) if self.pooling.normalized else vectors


def _no_cache(module: Any) -> dict[str, bool]:
    """Returns the argument that keeps a decoder from caching K and V."""
    return {"use_cache": False} if getattr(module.config, "use_cache", None) is not None else {}


def prove_pooling_model(
    module: Any, pooling: Pooling, prepare: Callable[[nn.Module], None], *, types: bool
) -> PoolingModel:
    """Returns the model that makes the same vectors of texts in one row as the stock module makes of each
    text alone. prepare: makes the module fast, in place; types: whether its tokenizer tells the texts of a
    pair apart. Raises ConfigError if there is none."""
    config = module.config
    generator = torch.Generator().manual_seed(0)
    low, size = 3, int(config.vocab_size)  # past the tokens that mostly stand for padding
    texts = [torch.randint(min(low, size - 1), size, (1, count), generator=generator) for count in _PROBE]
    padding = config.get_text_config().pad_token_id
    texts = [text.masked_fill(text == (-1 if padding is None else padding), size - 1) for text in texts]
    scores = pooling.task == "score"
    with torch.inference_mode():
        stock = [_stock(module, text, scores=scores) for text in texts]
    body = getattr(module, module.base_model_prefix) if scores else module
    if hasattr(body, "pooler") and not scores:
        body.pooler = None  # what it makes is not asked for
    module.set_attn_implementation(NAME)
    if config.get_text_config()._attn_implementation != NAME:
        raise ConfigError("it does not use transformers' attention interface")
    prepare(module)
    head = None
    if scores:
        setattr(module, module.base_model_prefix, _States(body))
        if config.get_text_config().pad_token_id is None:
            config.get_text_config().pad_token_id = 0  # of which there is none among states
        head = module
    types = types and getattr(config, "type_vocab_size", 0) > 1
    tokens, lengths = torch.cat(texts, 1)[0].numpy(), np.array(_PROBE, np.int64)
    plain = Pooling(pooling.task)
    best = float("inf")
    with torch.inference_mode():
        for first in _firsts(body):
            for mode in _HEADS if scores else ("mean",):
                tried = PoolingModel(body, head, plain, mode, first, types)
                found = tried(tokens, lengths, (0,) * len(texts))
                expected = torch.cat(stock).float()
                error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
                best = min(best, error)
                if error < (1e-4 if next(body.parameters()).dtype == torch.float32 else 5e-2):
                    return PoolingModel(body, head, pooling, pooling.mode or mode, first, types)
    raise ConfigError(f"what it makes of texts side by side differs from what it makes of each by {best:.1e}")


def _stock(module: Any, text: Tensor, *, scores: bool) -> Tensor:
    """Returns the stock module's result for one text [1, n]: its score, or the mean of its states."""
    if scores:
        logits: Tensor = module(input_ids=text, **_no_cache(module)).logits
        return logits
    states: Tensor = module(input_ids=text, **_no_cache(module)).last_hidden_state
    return states.float().mean(1)


def _firsts(body: nn.Module) -> list[int]:
    """Returns the positions at which a text may begin. Tables with a row for padding begin behind that."""
    rows = [
        table.padding_idx
        for name, table in body.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding)
    ]
    return [row + 1 for row in rows if row is not None] + [0]
