"""Plain torch twins of the kernels: they define what the kernels compute, in any dtype, at any speed. And the
check of a tensor that all kernels share."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.types.geometry import SCALED, row_bytes

Activation = Literal["silu", "gelu", "gelu_tanh"]


def check(name: str, tensor: Tensor, *shape: int, dtypes: tuple[Any, ...] = ()) -> None:
    """Raises ValueError if a tensor has another shape (-1: any size) or dtype, or gaps in its last
    dimension."""
    have = tensor.shape
    fits = len(have) == len(shape) and (not dtypes or tensor.dtype in dtypes)
    if fits and have != shape:
        fits = all(want in (-1, n) for want, n in zip(shape, have, strict=True))
    if not fits or (tensor.stride(-1) != 1 and have[-1] > 1):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "values"
        raise ValueError(
            f"{name}: want {kinds} {list(shape)}, the last dimension without gaps, "
            f"got {tensor.dtype} {list(have)} with strides {list(tensor.stride())}"
        )


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the length of the arena's last dimension: of int8 it holds a row's scale, too."""
    return row_bytes(head_dim, dtype.itemsize, _scaled(dtype)) // dtype.itemsize


def _scaled(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in SCALED


_LEAST = 1e-30  # the largest magnitude of a row that is not all zeros; 127 / it is finite
_MOST = 127.0


def to_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [..., D] as rows [..., `row_width`] of K or V. A row of int8 with a number that is not finite
    gets a scale that is no number."""
    if not _scaled(dtype):
        return x.to(dtype)
    x = x.float()
    most = x.abs().amax(-1, keepdim=True)
    used = most > _LEAST
    scale = torch.where(most.isfinite(), torch.where(used, most / _MOST, 0.0), torch.nan)
    codes = torch.where(used & most.isfinite(), x * (_MOST / most), 0.0).round()
    head_dim, width = x.shape[-1], row_width(x.shape[-1], dtype)
    rows = torch.zeros((*x.shape[:-1], width), dtype=dtype, device=x.device)
    rows[..., :head_dim] = codes.to(dtype)
    rows[..., width - scale.itemsize :] = scale.contiguous().view(dtype)
    return rows


def from_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Returns rows [..., `row_width`] of K or V as float32 [..., D]."""
    if not _scaled(rows.dtype):
        return rows.float()
    scale = rows[..., rows.shape[-1] - 4 :].contiguous().view(torch.float32)
    return rows[..., :head_dim].float() * scale


def block_view(arena: Tensor, block_bytes: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Views a flat byte arena as [blocks, 2, tokens, `row_width`]; 0 is K, 1 is V.

    Bytes at a block's end that hold no whole token are skipped by the block stride.
    """
    width = row_width(head_dim, dtype)
    tokens = block_bytes // (2 * width * dtype.itemsize)
    if arena.dtype != torch.uint8 or arena.dim() != 1 or block_bytes % 64 or not tokens:
        raise ValueError(
            f"arena: want flat uint8 and blocks of a multiple of 64 bytes with room for a token of size "
            f"{head_dim}, got {arena.dtype} {tuple(arena.shape)}, {block_bytes} bytes"
        )
    blocks = arena.numel() // block_bytes
    values = arena[: blocks * block_bytes].view(dtype)
    strides = (block_bytes // dtype.itemsize, tokens * width, width, 1)
    return values.as_strided((blocks, 2, tokens, width), strides)


def write_kv(
    arena: Tensor, page_map: Tensor, layer: int, k: Tensor, v: Tensor, slot_page: Tensor, slot_offset: Tensor
) -> None:
    """Stores k, v [n, kv_heads, D] in arena [blocks, 2, T, `row_width`] at token slot_offset[i] of page
    slot_page[i].

    page_map [pages, layers, kv_heads], slot_page [n] and slot_offset [n] are int32. On a GPU a row whose page
    is negative, a graph's padding, is stored nowhere.
    """
    kept = slot_page >= 0
    blocks = page_map[slot_page[kept].long(), layer].long()
    offsets = slot_offset[kept].long()[:, None].expand_as(blocks)
    arena[blocks, 0, offsets] = to_rows(k[kept], arena.dtype)
    arena[blocks, 1, offsets] = to_rows(v[kept], arena.dtype)


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
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attends with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, `row_width`]; page_map [pages, layers, kv_heads], tables [B, pages of the longest]
    and lengths [B] are int32. A window n > 0 hides all but the last n tokens; a softcap c > 0 bends scores s
    to c tanh(s / c). sinks and slopes [heads] are float32: a sink is the score of one more key, whose value
    is 0, and a score loses its head's slope for each token from the key's to the query's (ALiBi).
    """
    for b, length in enumerate(lengths.tolist()):
        k, v = _cached(arena, page_map, layer, tables[b], length, q.shape[2])
        start = max(0, length - window) if window else 0
        bias = None if slopes is None else biases(slopes, length - 1 - start, 1, length - start)
        row = slice(b, b + 1)
        out[row] = _attend(q[row], k[:, start:], v[:, start:], None, scale, softcap, sinks, bias)


def prefill_attention(
    out: Tensor,
    q: Tensor,
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    begins: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Computes causal attention of the new tokens of B sequences, packed: sequence b's queries are rows
    [begins[b], begins[b + 1]) of q [N, heads, D], at positions from starts[b] on. Their K and V are in the
    pool already; starts [B] and begins [B + 1] are int32, all else is as in `decode_attention`."""
    edges = begins.tolist()
    for b, start in enumerate(starts.tolist()):
        new = slice(edges[b], edges[b + 1])
        end = start + edges[b + 1] - edges[b]
        if end == start:
            continue
        k, v = _cached(arena, page_map, layer, tables[b], end, q.shape[2])
        positions = torch.arange(end, device=q.device)
        ahead = positions[start:, None] - positions
        seen = (ahead >= 0) & (ahead < window) if window else ahead >= 0
        bias = None if slopes is None else biases(slopes, start, end - start, end)
        out[new] = _attend(q[new], k, v, seen, scale, softcap, sinks, bias)


def _cached(
    arena: Tensor, page_map: Tensor, layer: int, table: Tensor, length: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Returns K and V [kv_heads, length, D] of one sequence, in float32."""
    pages = table[: -(-length // arena.shape[2])].long()
    blocks = from_rows(arena[page_map[pages, layer].long()], head_dim)  # [pages, kv_heads, 2, T, D]
    k, v = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return k, v


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Takes q [n, heads, D], k and v [kv_heads, L, D], seen [n, L], bias [heads, n, L] and returns
    [n, heads, D] in q's dtype."""
    grouped = q.float().view(q.shape[0], k.shape[0], q.shape[1] // k.shape[0], q.shape[2])
    scores = torch.einsum("nhgd,hld->hgnl", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hgnl,hld->nhgd", softmax(scores, sinks), v)
    return out.flatten(1, 2).to(q.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the weights of scores [kv_heads, group, n, L], whose sums are less than 1 if heads have
    sinks."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def biases(slopes: Tensor, offset: int, n: int, length: int) -> Tensor:
    """Returns ALiBi's biases [heads, n, length] of queries at `offset` and after it."""
    distance = torch.arange(length, device=slopes.device) - torch.arange(
        offset, offset + n, device=slopes.device
    ).unsqueeze(1)
    return slopes[:, None, None] * distance


def merge(out: Tensor, parts: Tensor, lse: Tensor) -> None:
    """Computes out [N, H, D] = attention over all tokens, from parts [S, N, H, D], each over some of them,
    and the logarithms lse [S, N, H] of their sums of exponentials. A part whose lse is -inf saw no token and
    may hold anything; if all are, out is 0."""
    total = lse.logsumexp(0)
    shares = (lse - total).exp().masked_fill(lse == float("-inf"), 0.0)[..., None]
    kept = parts.float().masked_fill(shares == 0, 0.0)
    out.copy_((kept * shares).sum(0))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalises x [..., H] by its root mean square and scales by offset + weight [H]; Gemma's offset is
    1."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normal * (offset + weight.float())).to(x.dtype)
    return weight * normal.to(x.dtype)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Takes x [n, 2 F], gates first, and returns activation(gates) · the rest, [n, F]; gelu is by erf."""
    gates, rest = x.chunk(2, -1)
    return activate(gates, activation) * rest


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Returns activation(x); gelu is by erf."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first R dimensions of x [n, heads, D] in place by cos, sin [n, R]; i pairs with R/2 + i."""
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
    """Copies for each i tokens [offsets[i], offsets[i] + counts[i]) of K and of V from block own[i] of
    `source` to block peer[i] of `target`, both flat bytes; all tokens of a block take the bytes past them
    along."""
    half = page_tokens * token_bytes
    rows, targets = source.view(-1, block_bytes), target.view(-1, block_bytes)
    for i, o, first, n in zip(*(a.tolist() for a in (own, peer, offsets, counts)), strict=True):
        spans = [slice(block_bytes)]
        if n < page_tokens:
            spans = [slice(v + first * token_bytes, v + (first + n) * token_bytes) for v in (0, half)]
        for span in spans:
            targets[o, span] = rows[i, span]


def copy_pages(
    arena: Tensor,
    page_map: Tensor,
    sources: Tensor,
    targets: Tensor,
    counts: Tensor,
    *,
    block_bytes: int,
    page_tokens: int,
    token_bytes: int,
) -> None:
    """Copies for each i the first counts[i] tokens of page sources[i] to page targets[i], in all layers and
    heads of page_map [pages, layers, kv_heads]; blocks as in `copy_blocks`."""
    own, peer = page_map[sources.long()].flatten(1), page_map[targets.long()].flatten(1)
    repeated = counts[:, None].expand_as(own).flatten()
    copy_blocks(
        arena,
        arena,
        own.flatten(),
        peer.flatten(),
        torch.zeros_like(repeated),
        repeated,
        block_bytes=block_bytes,
        page_tokens=page_tokens,
        token_bytes=token_bytes,
    )


def advance(
    ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
    tables: Tensor,
    page_tokens: int,
) -> None:
    """Appends in place to each of the first B rows the token that it has drawn, ids [B], one position on.

    tokens, positions, lengths, slot_page and slot_offset have B rows or more; tables [B, P] has the page of
    the new position, of page_tokens tokens.
    """
    rows = len(ids)
    tokens[:rows] = ids
    positions[:rows] += 1
    lengths[:rows] += 1
    slot_page[:rows] = tables.gather(1, positions[:rows, None] // page_tokens)[:, 0]
    slot_offset[:rows] = positions[:rows] % page_tokens


def panel_product(x: Tensor, w: Tensor) -> Tensor:
    """Returns x [n, K] · w [K, 64], for one panel of a packed weight."""
    return x @ w


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns what an adapter adds to a product: scale · (x [n, K] · A [r, K]ᵀ) · B [N, r]ᵀ."""
    return (x @ a.float().T * scale) @ b.float().T


def score(q: Tensor, k: Tensor) -> Tensor:
    """Returns q [n, D] · k [t, D]ᵀ: an attention tile's scores, and a tied head's logits."""
    return q @ k.T
