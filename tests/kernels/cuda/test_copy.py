"""Copies of blocks on the device, in Triton's interpreter."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
from torch import Tensor

from kvloom.exec.cuda.operations import plain_operations
from kvloom.kernels import reference
from kvloom.kernels.cuda.copy import block_tables, copy_blocks, copy_pages


class Layout(TypedDict):
    block_bytes: int
    page_tokens: int
    token_bytes: int


def layout(block_bytes: int, token_bytes: int) -> Layout:
    return {
        "block_bytes": block_bytes,
        "page_tokens": block_bytes // (2 * token_bytes),
        "token_bytes": token_bytes,
    }


def memory(blocks: int, block_bytes: int) -> Tensor:
    return torch.randint(256, (blocks * block_bytes,), dtype=torch.uint8)


@pytest.mark.parametrize("token_bytes", [1, 6, 32, 160])
@pytest.mark.parametrize("block_bytes", [2112, 16448])
def test_blocks_and_parts_of_them(token_bytes: int, block_bytes: int) -> None:
    torch.manual_seed(token_bytes + block_bytes)
    form = layout(block_bytes, token_bytes)
    source, target = memory(9, block_bytes), memory(9, block_bytes)
    own, peer = (torch.randperm(9)[:6].int() for _ in range(2))
    offsets = torch.randint(form["page_tokens"], (6,), dtype=torch.int32)
    counts = (torch.rand(6) * (form["page_tokens"] - offsets + 1)).int()
    offsets[:2], counts[:2] = 0, form["page_tokens"]
    wanted = target.clone()
    reference.copy_blocks(source, wanted, own, peer, offsets, counts, **form)
    copy_blocks(source, target, own, peer, offsets, counts, **form)
    assert target.equal(wanted)


def test_pages_of_all_layers_in_one_launch() -> None:
    torch.manual_seed(1)
    form = layout(2112, 96)
    arena = memory(40, 2112)
    page_map = torch.randperm(40)[:36].view(6, 3, 2).int()
    ids = [torch.tensor(pages, dtype=torch.int32) for pages in ([4, 0], [1, 5], [3, form["page_tokens"]])]
    wanted = arena.clone()
    reference.copy_pages(wanted, page_map, *ids, **form)
    assert not wanted.equal(arena)
    copy_pages(arena, page_map, *ids, **form)
    assert arena.equal(wanted)


def test_blocks_of_the_pages_that_sequences_have() -> None:
    """Into tables of either order; the rest stays as it is."""
    torch.manual_seed(2)
    page_map = torch.randperm(90 * 15).view(90, 5, 3).int()
    tables = torch.randint(90, (4, 70), dtype=torch.int32)
    lengths = torch.tensor([8 * 70, 0, 1, 8 * 64 + 1], dtype=torch.int32)
    tables[1], tables[2, 1:] = 1 << 30, 1 << 30
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        shape = (5, 4, 3, 70) if order[1] == 1 else (5, 3, 4, 70)
        found, wanted = (torch.full(shape, -1, dtype=torch.int32).permute(order) for _ in range(2))
        block_tables(found, page_map, tables, lengths, 8)
        plain_operations().block_tables(wanted, page_map, tables, lengths, 8)
        assert found.equal(wanted)
        assert (found >= 0).sum() == 15 * (70 + 1 + 65)


def test_what_does_not_fit_is_refused() -> None:
    one, some = torch.zeros(1, dtype=torch.int32), memory(1, 4096)
    with pytest.raises(ValueError, match="want a multiple of 4 that holds 9"):
        copy_blocks(some, some, one, one, one, one, block_bytes=4096, page_tokens=9, token_bytes=256)
    with pytest.raises(ValueError, match="counts: want int32"):
        copy_blocks(some, some, one, one, one, one.long(), **layout(4096, 256))
