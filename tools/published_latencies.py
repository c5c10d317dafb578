"""Latencies that others published, for holding a cost model against. Milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvloom.plan.cost.work import Work

Line = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Published:
    source: str
    device: str
    gpus: int
    work: Work
    milliseconds: float


def published() -> list[Published]:
    return [*_muxserve(), *_distserve(), *_splitwise()]


def _muxserve() -> Iterator[Published]:
    """The notebooks' rows of the model that the profile's CSV lacks, on 4 GPUs: decode steps of 1, 8, 32 and
    128 sequences at 256 tokens of context, prefills of 1 and 8 prompts of 512."""
    rows = {
        1.0: ((23.3, 23.9, 24.1, 40.5), (63.0, 405.0)),
        0.3: ((25.8, 26.2, 33.0, 76.9), (151.0, 992.0)),
    }
    for share, (decodes, prefills) in rows.items():
        for batch, found in zip((1, 8, 32, 128), decodes, strict=True):
            work = Work.decode("llama-30b", share, [256] * batch)
            yield Published("MuxServe, decode", "A100-80", 4, work, found)
        for batch, found in zip((1, 8), prefills, strict=True):
            work = Work.prefill("llama-30b", share, [512] * batch)
            yield Published("MuxServe, prefill", "A100-80", 4, work, found)


def _distserve() -> Iterator[Published]:
    """DistServe's fits (OSDI'24) at some points: prefill a + b·tokens + c·tokens², decode a + b·context +
    c·batch; beyond 95 sequences another line."""
    yield from _fits(
        "DistServe",
        "opt-13b",
        1,
        (16.46, 0.09265, 6.47e-6),
        (19.93, 6.27e-4, 0.0385),
        (7.17, 5.80e-4, 0.1583),
    )
    yield from _fits("DistServe", "opt-66b", 4, (26.77, 0.1376, 7.56e-6), (30.76, 4.52e-4, 0.0633))
    yield from _fits("vLLM by DistServe", "opt-13b", 1, (23.63, 0.1505, 8.65e-6), (19.56, 4.94e-4, 0.0506))


def _fits(
    source: str, model: str, gpus: int, prefill: Line, small: Line, large: Line | None = None
) -> Iterator[Published]:
    a, b, c = prefill
    for tokens in (128, 256, 512, 1024, 2048):
        found = a + b * tokens + c * tokens**2
        work = Work.prefill(model, 1.0, [tokens])
        yield Published(f"{source}, prefill", "A100-80", gpus, work, found)
    for batch in (1, 8, 32, 64, 128):
        line = large if batch >= 95 else small
        if line is None:
            continue
        for context in (128, 512, 1024):
            found = line[0] + line[1] * batch * context + line[2] * batch
            work = Work.decode(model, 1.0, [context] * batch)
            yield Published(f"{source}, decode", "A100-80", gpus, work, found)


def _splitwise() -> Iterator[Published]:
    """Splitwise's (ISCA'24) measurements of Llama2-70B on two devices."""
    prompts = {
        "A100-80": (81, 113, 196, 377, 687, 1480, 2990),
        "H100": (48, 52, 83, 158, 308, 642, 1339),
    }
    for device, latencies in prompts.items():
        for doubled, found in enumerate(latencies):
            work = Work.prefill("llama2-70b", 1.0, [128 << doubled])
            yield Published("Splitwise, prefill", device, 2, work, found)
    for device, batch, token in (("A100-80", 1, 55.5), ("H100", 1, 37.0), ("H100", 32, 52.2)):
        work = Work.decode("llama2-70b", 1.0, [1024] * batch)
        yield Published("Splitwise, decode", device, 2, work, token)
