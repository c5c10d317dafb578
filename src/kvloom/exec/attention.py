"""kvloom's attention as transformers' AttentionInterface calls it: it writes new K and V, and attends over
the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvloom.exec.huggingface import AttentionInterface
from kvloom.kernels import cpu, reference
from kvloom.kernels.cpu.attention.runs import RowRuns, row_runs
from kvloom.kernels.cpu.kv_rows import KINDS
from kvloom.kv.shared import SharedPrefixes, shared_prefixes
from kvloom.offload.cpu.attention import Polls, RemoteAttention
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64
from kvloom.types.job import ForwardPlan, PageCopy

NAME = "kvloom"
_MIN_ROWS: Final = 4
"""The fewest rows of a product by oneDNN, whose kernels for 4 rows read the weights faster than those for 1
to 3 do (seen on Zen 4: 33 → 44 GB/s)."""
_ROW_STEP: Final = 8
"""Rows are filled up to a multiple of this, or of the next power of two over `_MOST_STEPS` if that is
more."""
_MOST_STEPS: Final = 32
_KNOWN = {"dropout", "position_ids", "kv", "texts", "is_causal"}  # asked for, and harmless to leave out


@dataclass(frozen=True, slots=True)
class Scoring:
    """The form in which a layer turns q · k into a score."""

    scale: float
    window: int = 0  # keys that a query sees, its own among them; 0 for all
    softcap: float = 0.0  # the bound that tanh bends scores to; 0 for none
    sinks: Tensor | None = None  # [Hq] float32: the score of one more key, which has no value
    slopes: Tensor | None = None  # [Hq] float32: what a score loses for each token between (ALiBi)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Neighbouring sequences of a batch that all append one token, or all several."""

    decode: bool
    sequences: slice
    rows: slice
    """The rows of their new tokens."""
    cu_seqlens: Tensor
    """[B + 1] edges of the sequences' rows, from the part's first row on."""
    shared: SharedPrefixes | None
    """The prefixes that the rows share, if each sequence appends one token."""


def _parts(plan: ForwardPlan, page_tokens: int) -> tuple[BatchPart, ...]:
    """Cuts a batch into parts: in each, all sequences append one token, or all append several."""
    batch = len(plan.appends)
    if batch == plan.positions.size and batch:  # a decode step
        every, shared = slice(0, batch), shared_prefixes(plan.tables, plan.starts, page_tokens)
        return (BatchPart(True, every, every, torch.arange(batch + 1, dtype=torch.int32), shared),)
    ones, edges = plan.appends == 1, np.concatenate(([0], plan.appends.cumsum())).astype(np.int32)
    cuts = [*(np.flatnonzero(ones[1:] != ones[:-1]) + 1).tolist(), len(ones)] if len(ones) else []
    parts, first = [], 0
    for end in cuts:
        decode, of = bool(ones[first]), slice(first, end)
        part = BatchPart(
            decode,
            of,
            slice(int(edges[first]), int(edges[end])),
            torch.from_numpy(edges[first : end + 1] - edges[first]),
            shared_prefixes(plan.tables[of], plan.starts[of], page_tokens) if decode else None,
        )
        parts.append(part)
        first = end
    return tuple(parts)


@dataclass(slots=True)
class ForwardState:
    """The state of one forward of one model over the arena; made from its plan once for all layers.

    Positions [0, start) of each sequence are valid before the layer, [0, start + append) after its write.
    """

    plan: ForwardPlan
    arena: Tensor  # [blocks, 2, T, D], of int8 with a scale behind each row
    remote: RemoteAttention | None = None
    """Attends for the offloaded rows, which come after those of the plan; None if there are none."""
    polls: Polls | None = None
    """Does tasks of other units between operators; None if this unit does not lend."""
    behind: int = 0
    """The number of layers by which sends follow the writes: 1 if other ranks write too. At the next layer
    this rank has the other ranks' parts of the sum after attention, so they have written."""
    page_map: Tensor = field(init=False)  # [pages, layers, heads]
    parts: tuple[BatchPart, ...] = field(init=False)
    tables: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    slot_page: Tensor = field(init=False)
    slot_offset: Tensor = field(init=False)
    _runs: list[RowRuns | None] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.parts = _parts(plan, self.arena.shape[2])
        self.page_map = torch.from_numpy(plan.page_map)
        self.tables = torch.from_numpy(plan.tables)
        self.starts = torch.from_numpy(plan.starts.astype("int32"))
        self.lengths = torch.from_numpy((plan.starts + plan.appends).astype("int32"))
        self.slot_page = torch.from_numpy(plan.slot_page)
        self.slot_offset = torch.from_numpy(plan.slot_offset)

    @property
    def positions(self) -> I64:
        """Returns the positions [N] of the new tokens in their sequences, the offloaded ones last."""
        own = self.plan.positions
        return own if self.remote is None else np.concatenate((own, self.remote.positions))

    def poll(self) -> None:
        """Marks the end of an operator other than attention."""
        if self.polls is not None:
            self.polls.poll()

    @property
    def native(self) -> bool:
        """Returns whether the compiled kernels take this arena; the plain twins take any."""
        return self.arena.dtype in KINDS and self.arena.device.type == "cpu"

    @property
    def decode(self) -> bool:
        """Returns whether each sequence appends one token."""
        return all(part.decode for part in self.parts)

    @property
    def shared(self) -> SharedPrefixes | None:
        """Returns the prefixes that the rows of a decode step share; None if they share none, or it is no
        decode step."""
        return self.parts[0].shared if self.parts and self.decode else None

    def copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        """Copies on write, in all layers at once."""
        for copy in copies:
            source, target = self.page_map[copy.source].flatten(), self.page_map[copy.target].flatten()
            self.arena[target, :, : copy.tokens] = self.arena[source, :, : copy.tokens]

    def send(self, layer: int) -> None:
        """Sends what this layer, or the one that is `behind` it, has written for peers."""
        if layer >= self.behind:
            for send in self.plan.sends:
                send.put(self.plan.page_map, layer - self.behind)

    def send_rest(self) -> None:
        """Sends what the last layers have written, after the forward."""
        layers = self.plan.page_map.shape[1]
        for layer in range(layers, layers + self.behind):
            self.send(layer)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Takes q [N, Hq, D], k and v [N, Hkv, D] of the new tokens and returns [N, Hq, D]. Rows past these
        tokens are padding, and get the last token's output. Remote rows are posted first; those at home are
        computed meanwhile."""
        self.poll()
        remote, home = self.remote, self.plan.positions.size
        count = home if remote is None else home + remote.count
        out = torch.empty(q.shape, dtype=q.dtype)
        if remote is not None:
            rows = torch.cat((q, k, v), 1)[home:count].float()
            task = remote.post(layer, rows, scoring.scale, scoring.window, scoring.softcap)
        if home:
            self._write(layer, k[:home], v[:home])
            self._attend_home(layer, q[:home], out[:home], scoring)
        if remote is not None:
            theirs = out[home:count].float()  # the rows of `out` themselves if those are float32
            remote.collect(task, theirs)
            if theirs.dtype != out.dtype:
                out[home:count] = theirs
        out[count:] = out[count - 1]
        if self.polls is not None:
            self.polls.attended()
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the new tokens' K and V into their slots, and sends to peers what they wait for."""
        write = reference.write_kv
        if self.native:
            write, k, v = cpu.write_kv, k.float(), v.float()
        write(self.arena, self.page_map, layer, k, v, self.slot_page, self.slot_offset)
        self.send(layer)

    def _attend_home(self, layer: int, q: Tensor, out: Tensor, scoring: Scoring) -> None:
        """Attends for the sequences of the plan, whose new K and V are written."""
        if not self.native:
            self._attend_plainly(layer, q, out, scoring)
            return
        wide = out if q.dtype == torch.float32 else q.float()  # kernels may overwrite their queries
        q = q if wide is out else wide
        form, kv_heads = (scoring.scale, scoring.window, scoring.softcap), self.page_map.shape[2]
        sinks, slopes = scoring.sinks, scoring.slopes
        if not self._runs:
            group = q.shape[1] // kv_heads
            self._runs = [runs_of(part.shared, kv_heads, group) for part in self.parts]
        for part, runs in zip(self.parts, self._runs, strict=True):
            of, to, rows = part.sequences, wide[part.rows], q[part.rows]
            pool = self.arena, self.page_map, layer, self.tables[of]
            if part.decode:
                cpu.decode_attention(
                    to, rows, *pool, self.lengths[of], *form, runs, sinks=sinks, slopes=slopes
                )
            else:
                cpu.prefill_attention(
                    to, rows, *pool, self.starts[of], part.cu_seqlens, *form, sinks=sinks, slopes=slopes
                )
        if wide is not out:
            out.copy_(wide)

    def _attend_plainly(self, layer: int, q: Tensor, out: Tensor, scoring: Scoring) -> None:
        """Attends by torch, for formats of K and V that the kernels do not read."""
        q, begin = q.float(), 0
        starts, counts = self.plan.starts.tolist(), self.plan.appends.tolist()
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            new = slice(begin, begin + count)
            first = max(0, start - scoring.window + 1) if scoring.window else 0
            k, v, first = self._gather(layer, i, first, start + count, q.shape[-1])
            out[new] = attend_dense(q[new].transpose(0, 1), k, v, start - first, scoring).transpose(0, 1)
            begin += count

    def _gather(self, layer: int, i: int, first: int, end: int, head_dim: int) -> tuple[Tensor, Tensor, int]:
        """Returns K and V [Hkv, end − first', D], float32, of sequence i from the page that holds `first` on,
        and first', that page's first position."""
        tokens = self.arena.shape[2]
        low = first // tokens
        pages = self.tables[i, low : -(-end // tokens)]
        blocks = reference.from_rows(self.arena[self.page_map[pages, layer]], head_dim)  # [P, Hkv, 2, T, D]
        both = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : end - low * tokens]
        return both[0], both[1], low * tokens


def runs_of(shared: SharedPrefixes | None, kv_heads: int, group: int) -> RowRuns | None:
    """Returns the order in which a decode step's rows are computed if some share a prefix; None if none do.
    group: query heads of a KV head."""
    if shared is None:
        return None
    threads = torch.get_num_threads()
    return row_runs(shared.order, shared.common, kv_heads, group, threads, shared.joined)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, offset: int, scoring: Scoring) -> Tensor:
    """Computes causal attention of q [Hq, n, D], at positions offset…offset+n−1, over k and v [Hkv, L, D]."""
    scale, window, softcap = scoring.scale, scoring.window, scoring.softcap
    n, length = q.shape[1], k.shape[1]
    plain = not softcap and scoring.sinks is None and scoring.slopes is None
    simple = plain and offset == 0 and not (window and window < n)
    seen = None if simple else _seen(n, length, offset, window, q.device)
    if seen is None or plain:
        grouped = q.shape[0] != k.shape[0]
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, is_causal=simple, scale=scale, enable_gqa=grouped
        )[0]
    group = q.shape[0] // k.shape[0]
    scores = q.reshape(-1, group, n, q.shape[-1]) @ k[:, None].transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if scoring.slopes is not None:
        scores = scores + reference.biases(scoring.slopes, offset, n, length).view(scores.shape)
    scores = scores.masked_fill(~seen, float("-inf")).float()
    weights = reference.softmax(scores, scoring.sinks).to(v.dtype)
    return (weights @ v[:, None]).flatten(0, 1)


def _seen(n: int, length: int, offset: int, window: int, device: torch.device) -> Tensor:
    """Returns which keys the queries from `offset` on see: [n, length]."""
    ahead = torch.arange(offset, offset + n, device=device)[:, None] - torch.arange(length, device=device)
    return (ahead >= 0) & (ahead < window) if window else ahead >= 0


def _matters(name: str, given: Any) -> bool:
    """Returns True if leaving the argument out would change what attention computes."""
    return name not in _KNOWN and (isinstance(given, Tensor) or bool(given))


def passed_on(name: str, attention_mask: Tensor | None, arguments: Mapping[str, Any]) -> Any:
    """Returns what the model was called with under this name. Raises ConfigError if its layers do not pass it
    on to attention, or ask for something that kvloom does not have."""
    if arguments.get(name) is None:
        raise ConfigError("its layers do not pass on what kvloom's attention needs")
    strange = sorted(other for other, given in arguments.items() if _matters(other, given))
    if strange or attention_mask is not None:
        raise ConfigError(
            f"its attention asks for {', '.join(strange) or 'a mask'}, which kvloom does not have"
        )
    return arguments[name]


def kvloom_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Takes query and key [1, H, N, D] and value [1, Hkv, N, Dv] and returns [1, N, Hq, Dv]. `kv` is the
    ForwardState, or the loader's observer, which has the same `attend`. A block holds K and V at one width,
    so zeros fill the narrower one up; they change no score and no sum."""
    state: ForwardState = passed_on("kv", attention_mask, kwargs)
    width = max(key.shape[-1], value.shape[-1])
    q, k, v = (_as_wide(x[0].transpose(0, 1), width) for x in (query, key, value))
    out = state.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        q,
        k,
        v,
        Scoring(
            scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            sinks=None if s_aux is None else s_aux.float().contiguous(),
            slopes=slopes,
        ),
    )
    return out[None, ..., : value.shape[-1]], None


def _as_wide(x: Tensor, width: int) -> Tensor:
    """Returns x [N, H, D] with zeros up to `width` numbers a row."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


AttentionInterface.register(NAME, kvloom_attention)


class Forward(Protocol):
    """Runs one forward of a model over the pages of `state`, whose plan says the positions."""

    def __call__(self, tokens: I64, kept: I64, state: ForwardState) -> Tensor:
        """Takes tokens [N] and kept [R] rows and returns logits [R or more, V]: those of the kept rows come
        first."""


class CompiledByRows(nn.Module):
    """A product that is compiled anew for each number of rows."""


class Modular:
    """Runs transformers' own modules, with what `fuse` has put into them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._fill = filling(module.modules())

    def __call__(self, tokens: I64, kept: I64, state: ForwardState) -> Tensor:
        logits: Tensor = self._module(
            input_ids=self._fill(tokens)[None],
            position_ids=self._fill(state.positions)[None],
            use_cache=False,
            logits_to_keep=self._fill(kept),
            kv=state,
        ).logits[0]
        return logits


def filling(modules: Iterable[nn.Module]) -> Callable[[I64], Tensor]:
    """Returns what makes a tensor of the values of a forward's rows: `padded` if products are compiled by
    rows."""
    return padded if any(isinstance(module, CompiledByRows) for module in modules) else torch.from_numpy


def padded(values: I64) -> Tensor:
    """Returns `values` [N] with the last one repeated up to `padded_rows(N)`. If there are none, it returns
    none. A repeated row asks no other expert of a mixture than its original."""
    short = padded_rows(values.size) - values.size if values.size else 0
    return torch.from_numpy(np.pad(values, (0, short), "edge") if short else values)


def padded_rows(rows: int) -> int:
    """Returns the number to which so many rows are filled up: 4, then a multiple of 8 up to 256, of 16 up to
    512, of 32 up to 1,024, and so on. oneDNN compiles a product for each number of rows, which takes half a
    millisecond or more, and forgets those of long ago; so there are few numbers."""
    if rows <= _MIN_ROWS:
        return _MIN_ROWS
    step = max(_ROW_STEP, (1 << (rows - 1).bit_length()) // _MOST_STEPS)
    return -(-rows // step) * step
