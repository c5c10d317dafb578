"""How jobs' latencies depend on their share of the device: figure 3."""

from __future__ import annotations

from typing import Final

from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.reproduce.muxserve.published import PUBLISHED
from kvloom.reproduce.muxserve.setup import DEVICE
from kvloom.reproduce.report import Cell, Claim, Report, Scale, Tell

_MODEL: Final = "llama-7b"
_TOKENS: Final = 128  # of each sequence
_SLIGHT: Final = 1.5  # times as long counts as little
_SMALL, _LARGE, _PREFILL = "decode, batch 1", "decode, batch 128", "prefill, batch 1"


def figure_3(_: Scale, tell: Tell) -> Report:
    """The cost model against what the paper has measured."""
    published = PUBLISHED.figure_3
    ours = {row: [seconds(row, share) * 1e3 for share in published.shares] for row in published.rows}
    tell("the cost model", 1.0)
    cells = [
        Cell(row=row, column=f"ms at {share:.0%}", paper=paper, ours=found)
        for row, papers in published.rows.items()
        for share, paper, found in zip(published.shares, papers, ours[row], strict=True)
    ]
    slower = {row: found[0] / found[-1] for row, found in ours.items()}
    claims = (
        Claim(
            said="decode on 30 % of the multiprocessors takes little longer than on all",
            holds=slower[_SMALL] <= _SLIGHT,
            found=f"{slower[_SMALL]:.2f}× in batches of 1, {slower[_LARGE]:.2f}× of 128",
        ),
        Claim(
            said="prefill takes longer by more than decode does",
            holds=slower[_PREFILL] > slower[_SMALL],
            found=f"{slower[_PREFILL]:.2f}× against {slower[_SMALL]:.2f}×",
        ),
    )
    return Report(
        name="figure 3",
        title="a job's latency by its share of the device, LLaMA-7B, 128 tokens",
        cells=tuple(cells),
        claims=claims,
    )


def seconds(row: str, share: float) -> float:
    """Of one of the figure's jobs."""
    cost = Roofline(find_device(DEVICE), 1, {_MODEL: find_shape(_MODEL)})
    phase, batch = row.split(", batch ")
    works = {"prefill": Work.prefill, "decode": Work.decode}
    return cost.seconds(works[phase](_MODEL, share, [_TOKENS] * int(batch)))
