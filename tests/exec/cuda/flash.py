"""FlashAttention 3 in plain torch: a twin of the packages' function, which refuses what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.kernels.cuda.flash import FlashAttention
from tests.exec.cuda.devices import COMPUTE

_REQUIRED = ("q", "k_cache", "v_cache")
_OPTIONAL = (
    *("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"),
    *("page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale"),
    *("k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
    *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
    "return_softmax_lse",
)
_ADDED = ("only_qv", "sinks", "score_mod", "aux_tensors", "ver", "out")


def _signature(*optional: str) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    required = [Parameter(name, kind) for name in _REQUIRED]
    return Signature([*required, *(Parameter(name, kind, default=None) for name in optional)])


SIGNATURES: Final = {
    # hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 01afd16d248c4c7d0f9aed1914084f16c490eaed
    "flash_attn_3": _signature(*_OPTIONAL),
    "sglang-kernel": _signature(*_OPTIONAL, *_ADDED),  # sgl_kernel/flash_attn.py of 0.4.10
}


def flash_attn_with_kvcache(*given: Any, **named: Any) -> Tensor:
    """Computes in float32 what the packages' `flash_attn_with_kvcache` does over pages: q [B, n, H, D], or
    [N, H, D] with the edges cu_seqlens_q [B + 1] of sequences' rows; the causal mask is aligned to the last
    of cache_seqlens [B] keys, and a row that sees none is 0."""
    for signature in SIGNATURES.values():
        call = signature.bind(*given, **named).arguments
    q, k, v, table, lengths = (
        call[name] for name in ("q", "k_cache", "v_cache", "page_table", "cache_seqlens")
    )
    edges, longest = call["cu_seqlens_q"], call["max_seqlen_q"]
    batch = len(q) if edges is None else len(edges) - 1
    _refuse(call, batch)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for b, length in enumerate(lengths.tolist()):
        rows = slice(b, b + 1) if edges is None else slice(int(edges[b]), int(edges[b + 1]))
        queries = q[rows].flatten(0, 1) if edges is None else q[rows]
        assert edges is None or len(queries) <= longest
        pages = table[b, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        out[rows] = _attend(queries, keys, values, call).view(out[rows].shape)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> Tensor:
    """Takes q [n, H, D], k and v [L, Hk, D] and returns [n, H, D]."""
    n, heads, _ = q.shape
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * call["softmax_scale"]
    if call["softcap"]:
        scores = call["softcap"] * torch.tanh(scores / call["softcap"])
    left, right = call["window_size"]
    ahead = torch.arange(n)[:, None] + len(k) - n - torch.arange(len(k))  # from the key to the query
    seen = ahead >= -right if right >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    seen &= ahead <= left if left >= 0 else True
    seen &= ahead >= 0 if call["causal"] else True
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)


def _refuse(call: dict[str, Any], batch: int) -> None:
    """Raises RuntimeError as TORCH_CHECK of hopper/flash_api.cpp does."""
    q, k, v, table, edges = (call[name] for name in ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q"))
    ids = [call["cache_seqlens"]] + ([] if edges is None else [edges])
    checks = {
        "the last dimension": all(x.stride(-1) == 1 for x in (q, k, v, table)),
        "dtype": q.dtype == k.dtype == v.dtype,
        "int32": all(x.dtype == torch.int32 for x in (table, *ids)),
        "contiguous": all(x.is_contiguous() for x in ids),
        "page_table": table.dim() == 2 and len(table) == batch,
        "cache_seqlens": call["cache_seqlens"].shape == (batch,),
        "q": q.dim() == 4 if edges is None else q.dim() == 3 and int(edges[-1]) == len(q),
        "max_seqlen_q": (edges is None) == (call["max_seqlen_q"] is None),
        "caches": k.shape == v.shape and k.dim() == 4 and k.shape[3] == q.shape[-1],
        "heads": q.shape[-2] % k.shape[2] == 0,
        "head_size": q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "num_splits": 1 <= call["num_splits"] <= 256,
        "sm_margin": 0 <= call["sm_margin"] < COMPUTE,
    }
    if wrong := [name for name, right in checks.items() if not right]:
        raise RuntimeError(f"the call is wrong in {', '.join(wrong)}")


def flash(kernel: Callable[..., Tensor] = flash_attn_with_kvcache, **how: Any) -> FlashAttention:
    """Returns the twin as if it were a package's on a device of `COMPUTE` multiprocessors."""
    return FlashAttention("a twin", kernel, COMPUTE, dtypes=(torch.float32,), **how)
