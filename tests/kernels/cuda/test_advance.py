"""From one decode step's inputs to the next one's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda.elementwise import advance


@pytest.mark.parametrize(("batch", "rows", "page_tokens"), [(1, 1, 8), (5, 8, 3), (130, 192, 32)])
def test_like_its_twin(batch: int, rows: int, page_tokens: int) -> None:
    """Of which some go over to their next page; rows of padding stay."""
    pages = 6
    tables = torch.randperm(batch * pages).view(batch, pages).int()
    positions = torch.arange(rows) % (pages * page_tokens - 1)
    given = [
        torch.zeros(rows, dtype=torch.int64),
        positions,
        (positions + 1).int(),
        torch.full((rows,), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
    ]
    ids = torch.randint(1, 1000, (batch,))

    def after(by: object) -> list[Tensor]:
        inputs = [one.clone() for one in given]
        by(ids, *inputs, tables, page_tokens)  # type: ignore[operator]
        return inputs

    found, wanted = after(advance), after(reference.advance)
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))
    tokens, _, _, slot_page, slot_offset = found
    assert tokens[:batch].equal(ids)
    assert (slot_page[batch:] == -1).all()
    at = positions[:batch] + 1
    assert (slot_page[:batch] == tables[torch.arange(batch), at // page_tokens]).all()
    assert (slot_offset[:batch] == at % page_tokens).all()
