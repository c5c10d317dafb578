"""What is compared in the benchmark of weaving, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from benchmarks.report import Cell, Finding, Report, this_machine
from kvloom.types.load import Waits
from kvloom.types.spec import WeaveSpec

HOT, COLD = "hot", "cold"
SHARE = 0.45  # the paper's best
QUARTER = 0.75  # away, where home holds a quarter
LENT = 0.3


@dataclass(frozen=True, slots=True)
class Variant:
    """prompts: fresh ones come to the cold unit beside what it decodes. pool: the hot unit's part of the
    blocks that its sequences, which come and go, need; 0 where all are of one age and there is room. rounds:
    so many of the first that it is in; None for all."""

    weave: WeaveSpec | None
    prompts: bool = False
    pool: float = 0.0
    rounds: int | None = None


VARIANTS = {
    "dedicated": Variant(None),
    "control between iterations": Variant(
        WeaveSpec(COLD, SHARE, LENT, control="iterations", split="none"), rounds=1
    ),
    "between operators": Variant(WeaveSpec(COLD, SHARE, LENT, split="none")),
    "operators split": Variant(WeaveSpec(COLD, SHARE, LENT)),
    "split for 2 %": Variant(WeaveSpec(COLD, SHARE, LENT, waits=0.02)),
    "split for 1 %": Variant(WeaveSpec(COLD, SHARE, LENT, waits=0.01)),
    "prompts at the cold one, dedicated": Variant(None, prompts=True, rounds=2),
    "prompts at the cold one, woven": Variant(WeaveSpec(COLD, SHARE, LENT), prompts=True, rounds=2),
    "the whole pool, dedicated": Variant(None, pool=1.0, rounds=2),
    "a quarter of the pool, dedicated": Variant(None, pool=0.25),
    "a quarter of the pool, woven": Variant(WeaveSpec(COLD, QUARTER, LENT), pool=0.25),
}
ALONE, HOST, OPERATORS, SPLIT, _, FINEST, PROMPTS, FED, WHOLE_POOL, FEW, WOVEN = VARIANTS


@dataclass(slots=True)
class Found:
    """Of one variant, a number a round: milliseconds a token, tokens/s; waits of the last task or so."""

    hot: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    waits: list[Waits] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # part of the cold unit's time that tasks take


def told(found: dict[str, Found], title: str) -> Report:
    columns = ["", "hot, ms a token", "cold, ms a token", "hot tokens/s", "wait, µs", "by the model"]
    return Report(
        name="weaving",
        title=title,
        columns=[*columns, "stall, µs", "by the model", "task, µs", "parts", "tasks, % of the cold core"],
        rows=[_row(name, one) for name, one in found.items()],
        findings=_findings(found),
        machine=this_machine(),
        raw={name: {"hot": one.hot, "cold": one.cold, "rate": one.rate} for name, one in found.items()},
    )


def _of(waits: list[Waits], name: str) -> float:
    """Microseconds."""
    return 1e6 * median(float(getattr(one, name)) for one in waits)


def _row(name: str, found: Found) -> list[Cell]:
    row: list[Cell] = [name, median(found.hot), median(found.cold), median(found.rate)]
    if not found.waits:
        return [*row, *[None] * 7]
    names = ("wait", "expected_wait", "stall", "expected_stall", "service")
    parts = max(one.parts for one in found.waits)
    return [*row, *(_of(found.waits, name) for name in names), parts, 100 * median(found.busy)]


def _findings(found: dict[str, Found]) -> list[Finding]:
    hot = {name: median(one.hot) for name, one in found.items()}
    cold = {name: median(one.cold) for name, one in found.items()}
    rate = {name: median(one.rate) for name, one in found.items()}
    return [
        Finding(what="hot, operators against iterations", value=hot[HOST] / hot[OPERATORS], least=3),
        Finding(what="hot, split against operators", value=hot[OPERATORS] / hot[SPLIT], least=1.05),
        Finding(what="hot, split for 1 % against operators", value=hot[OPERATORS] / hot[FINEST]),
        Finding(what="cold, split against dedicated", value=cold[SPLIT] / cold[ALONE], most=1.1),
        Finding(what="hot, split against dedicated", value=hot[SPLIT] / hot[ALONE]),
        Finding(what="prompts at the cold one, hot, woven against dedicated", value=hot[FED] / hot[PROMPTS]),
        Finding(what="prompts at the cold one, cold, the same", value=cold[FED] / cold[PROMPTS]),
        Finding(what="quarter of the pool, hot tokens/s", value=rate[WOVEN] / rate[FEW], least=1.4),
        Finding(what="quarter of the pool, cold", value=cold[WOVEN] / cold[FEW], most=1.15),
        Finding(what="the same, against the whole pool, dedicated", value=cold[WOVEN] / cold[WHOLE_POOL]),
        *(
            Finding(
                what=f"wait by the model against measured, {name}",
                value=_of(one.waits, "expected_wait") / _of(one.waits, "wait"),
                least=0.8,
                most=1.2,
            )
            for name, one in found.items()
            if one.waits
        ),
    ]
