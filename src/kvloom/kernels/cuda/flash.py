"""FlashAttention 3 (Shah et al., 2024) over the pool, by a package that has its `flash_attn_with_kvcache`.

Its kernels take one table of pages for a sequence, while here each KV head has blocks of its own. So each KV
head of a sequence is a sequence of one KV head to them, and a block is its page. The tables of all layers are
made once a forward. Prompts are read from the pool too, behind what is cached: the causal mask, which is
aligned to the last key, is then the right one, windows are right as well, and there is nothing to merge.

Lengths stay on the device, and the package splits long sequences there, so a recorded step may be replayed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)

PACKAGES: Final = {"flash_attn_interface": "flash_attn_3", "sgl_kernel.flash_attn": "sglang-kernel"}
"""Modules with the function, and the packages that they are of. Both take what is asked of it here."""

CAPABILITY: Final = (9, 0)  # Hopper's, for which these kernels are written
ROOM: Final = 64 << 20  # bytes of a forward's tables; a lane's recordings hold them once
_COLUMNS: Final = 16  # of a table's pages, as staging widens them
_MOST_SPLITS: Final = 32
_WAVES: Final = 4  # of programs on all multiprocessors, that the splits may make
_ROWS: Final = 128  # of queries of a program

BlockTables = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True)
class HeadSequences:
    """The KV heads of a batch as S sequences of one KV head each."""

    kv_heads: int
    tables: Tensor  # [layers, S, pages] int32: blocks; undefined past a sequence's length
    lengths: Tensor  # [S] int32, of K and V; a sequence of 0 sees nothing, and gets 0
    cu_seqlens: Tensor | None  # [S + 1] int32: the edges of their rows of q; None if each has one

    @classmethod
    def of_steps(
        cls, block_tables: BlockTables, page_map: Tensor, tables: Tensor, lengths: Tensor, page_tokens: int
    ) -> HeadSequences:
        """Returns those of a decode step, each sequence's heads beside each other. page_map [pages, layers,
        kv_heads], tables [B, P], lengths [B] with the new token, all int32."""
        _, layers, kv_heads = page_map.shape
        blocks = tables.new_empty(layers, len(tables), kv_heads, tables.shape[1])
        block_tables(blocks, page_map, tables, lengths, page_tokens)
        each = lengths[:, None].expand(-1, kv_heads).flatten().contiguous()  # of one sequence a view
        return cls(kv_heads, blocks.flatten(1, 2), each, None)

    @classmethod
    def of_prompts(
        cls,
        block_tables: BlockTables,
        page_map: Tensor,
        tables: Tensor,
        starts: Tensor,
        cu_seqlens: Tensor,
        rows: int,
        page_tokens: int,
    ) -> HeadSequences:
        """Returns those of a prefill of `rows` rows, head after head. Behind the B sequences of a head one
        more has the rows from cu_seqlens[B] on, which are padding, and no K and V. starts [B] and
        cu_seqlens [B + 1] are int32, all else is as in `of_steps`."""
        (_, layers, kv_heads), (batch, pages) = page_map.shape, tables.shape
        lengths = starts + cu_seqlens.diff()
        blocks = tables.new_empty(layers, kv_heads, batch + 1, pages)
        block_tables(blocks[:, :, :batch].transpose(1, 2), page_map, tables, lengths, page_tokens)
        first = torch.arange(kv_heads, dtype=torch.int32, device=cu_seqlens.device) * rows
        edges = F.pad((first[:, None] + cu_seqlens).flatten(), (0, 1), value=kv_heads * rows)
        return cls(kv_heads, blocks.flatten(1, 2), F.pad(lengths, (0, 1)).repeat(kv_heads), edges)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """A package's FlashAttention 3 on one device."""

    name: str  # of the package, with its version
    kernel: Callable[..., Tensor]  # its flash_attn_with_kvcache
    multiprocessors: int  # of the device
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    room: int = ROOM

    def refuses(self, arena: Tensor) -> str:
        """Returns why it cannot attend over an arena [blocks, 2, T, D]; nothing if it can."""
        tokens, head_dim = arena.shape[2:]
        if arena.dtype not in self.dtypes:
            return f"K and V are in {str(arena.dtype).removeprefix('torch.')}"
        if head_dim > 256 or head_dim % 8:
            return f"its heads have {head_dim} numbers, and a multiple of 8 up to 256 is right"
        most = 128 if head_dim <= 128 else 64
        if tokens >= most:
            # A page of whole tiles is loaded as it is, and what lies behind a sequence's end may be no number
            # (https://github.com/Dao-AILab/flash-attention/issues/1745).
            return f"its blocks hold {tokens} tokens, and fewer than {most} are right"
        return ""

    def widest(self, sequences: int, blocks_per_page: int) -> int:
        """Returns the pages of a sequence for which the tables of so many sequences have room."""
        return self.room // (4 * sequences * blocks_per_page * _COLUMNS) * _COLUMNS

    def attend(
        self,
        q: Tensor,
        arena: Tensor,
        heads: HeadSequences,
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        *,
        multiprocessors: int,
    ) -> Tensor:
        """Takes q [N, heads, D] of a decode step or of a prefill, whose K and V are in the arena already, and
        returns what `decode_attention` and `prefill_attention` give, with zeros for padding. multiprocessors:
        those that the current stream has."""
        rows, count, head_dim = q.shape
        group, steps = count // heads.kv_heads, heads.cu_seqlens is None
        if steps:
            given = q.reshape(-1, 1, group, head_dim)
        else:
            given = q.view(rows, heads.kv_heads, group, head_dim).transpose(0, 1).reshape(-1, group, head_dim)
        programs = len(heads.lengths) + rows * count // _ROWS
        out = self.kernel(
            given,
            arena[:, 0].unsqueeze(2),
            arena[:, 1].unsqueeze(2),
            cache_seqlens=heads.lengths,
            page_table=heads.tables[layer],
            cu_seqlens_q=heads.cu_seqlens,
            max_seqlen_q=None if steps else rows,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            softcap=softcap,
            num_splits=max(1, min(_MOST_SPLITS, _WAVES * multiprocessors // programs)),
            sm_margin=self.multiprocessors - multiprocessors,
        )
        if steps:
            return out.view(q.shape)
        return out.view(heads.kv_heads, rows, group, head_dim).transpose(0, 1).reshape(q.shape)


def find_flash(
    capability: tuple[int, int], multiprocessors: int, packages: Mapping[str, str] = PACKAGES
) -> FlashAttention | None:
    """Returns the first of the packages that is there, for a device of this compute capability; None if there
    is none, or the device is none of Hopper's. The log says of one that cannot be imported why."""
    if capability != CAPABILITY:
        return None
    for module, package in packages.items():
        try:
            kernel = importlib.import_module(module).flash_attn_with_kvcache
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
                continue
            _log.warning("%s is not used: %s", package, " ".join(str(error).split())[:200])
            continue
        return FlashAttention(f"{package} {_version(package)}".strip(), kernel, multiprocessors)
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a module that was put there without one
        return ""
