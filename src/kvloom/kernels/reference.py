"""Plain torch twins of the kernels: what they mean, in any dtype, at any speed."""

import torch
from torch import Tensor


def block_view(arena: Tensor, block_bytes: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """View a flat byte arena as [blocks, 2, tokens, head_dim]; 0 is K, 1 is V.

    Bytes at a block's end that hold no whole token are skipped by the block stride.
    """
    tokens = block_bytes // (2 * head_dim * dtype.itemsize)
    if arena.dtype != torch.uint8 or arena.dim() != 1 or block_bytes % 64 or not tokens:
        raise ValueError(
            f"arena: want flat uint8 and blocks of a multiple of 64 bytes with room for a token of size "
            f"{head_dim}, got {arena.dtype} {tuple(arena.shape)}, {block_bytes} bytes"
        )
    blocks = arena.numel() // block_bytes
    values = arena[: blocks * block_bytes].view(dtype)
    strides = (block_bytes // dtype.itemsize, tokens * head_dim, head_dim, 1)
    return values.as_strided((blocks, 2, tokens, head_dim), strides)


def write_kv(
    arena: Tensor, page_map: Tensor, layer: int, k: Tensor, v: Tensor, slot_page: Tensor, slot_offset: Tensor
) -> None:
    """Store k, v [n, kv_heads, D] in arena [blocks, 2, T, D] at token slot_offset[i] of page slot_page[i].

    page_map [pages, layers, kv_heads], slot_page [n] and slot_offset [n] are int32.
    """
    blocks = page_map[slot_page.long(), layer].long()
    offsets = slot_offset.long()[:, None].expand_as(blocks)
    arena[blocks, 0, offsets] = k.to(arena.dtype)
    arena[blocks, 1, offsets] = v.to(arena.dtype)


def decode_attention(
    out: Tensor,
    q: Tensor,
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D]; page_map [pages, layers, kv_heads], tables [B, pages of the longest] and
    lengths [B] are int32. A window n > 0 hides all but the last n tokens; a softcap c > 0 bends scores s to
    c tanh(s / c).
    """
    kv_heads, page_tokens, head_dim = page_map.shape[2], arena.shape[2], arena.shape[3]
    group = q.shape[1] // kv_heads
    for b, length in enumerate(lengths.tolist()):
        pages = tables[b, : -(-length // page_tokens)].long()
        blocks = arena[page_map[pages, layer].long()].float()  # [pages, kv_heads, 2, T, D]
        start = max(0, length - window) if window else 0
        k, v = blocks.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, start:length]
        scores = q[b].float().view(kv_heads, group, head_dim) @ k.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[b] = (scores.softmax(-1) @ v).reshape(-1, head_dim).to(out.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise x [..., H] by its root mean square and scale by offset + weight [H]; Gemma's offset is 1."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normal * (offset + weight.float())).to(x.dtype)
    return weight * normal.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R dimensions of x [n, heads, D] in place by cos, sin [n, R]; i pairs with R/2 + i."""
    size = cos.shape[-1]
    first, second = x[..., :size].chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    x[..., :size] = x[..., :size] * cos[:, None] + turned * sin[:, None]


def copy_blocks(
    source: Tensor,
    target: Tensor,
    own: Tensor,
    peer: Tensor,
    offsets: Tensor,
    counts: Tensor,
    *,
    block_bytes: int,
    page_tokens: int,
    token_bytes: int,
) -> None:
    """For each i copy tokens [offsets[i], offsets[i] + counts[i]) of K and of V from block own[i] of `source`
    to block peer[i] of `target`, both flat bytes; all tokens of a block take the bytes past them along."""
    half = page_tokens * token_bytes
    rows, targets = source.view(-1, block_bytes), target.view(-1, block_bytes)
    for i, o, first, n in zip(*(a.tolist() for a in (own, peer, offsets, counts)), strict=True):
        spans = [slice(block_bytes)]
        if n < page_tokens:
            spans = [slice(v + first * token_bytes, v + (first + n) * token_bytes) for v in (0, half)]
        for span in spans:
            targets[o, span] = rows[i, span]


def panel_product(x: Tensor, w: Tensor) -> Tensor:
    """x [n, K] · w [K, 64], one panel of a packed weight."""
    return x @ w


def score(q: Tensor, k: Tensor) -> Tensor:
    """q [n, D] · k [t, D]ᵀ: an attention tile's scores, and a tied head's logits."""
    return q @ k.T
