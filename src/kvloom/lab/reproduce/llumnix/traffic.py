"""The requests of Llumnix's experiments (section 6.1): their lengths, and the way in which they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.lab.reproduce.llumnix.setup import MODEL
from kvloom.lab.reproduce.report import Options
from kvloom.lab.workload.arrivals import Gaps, Steps, arrivals, poisson
from kvloom.lab.workload.lengths import STAND_INS, Sides, coupled
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64

ALIKE: Final = 2 / 3
"""The rank correlation of a conversation's prompts and answers, over the nine with GPT-4 that the preview of
BurstGPT's data shows. In the other workloads each side is drawn by itself."""
THRESHOLD: Final = 3  # blocks a request
LONG_THRESHOLD: Final = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload. `name` is as figure 11 has it, and `rates` are the published ones, in requests a second of
    16 instances. `gaps` says how requests come, `urgent` is the part of them that has priority -1, and
    `alike` the rank correlation of prompts and answers. `threshold` is the freeness below which an instance
    gives requests away in the paper's runs, and above which one takes them, in blocks a request."""

    name: str
    sides: Sides
    rates: tuple[float, ...] = ()
    gaps: Gaps = poisson
    urgent: float = 0.0
    alike: float = 0.0
    threshold: float = THRESHOLD

    def requests(self, rate: float, count: int, draw: int = 0) -> Iterator[WorkloadRequest]:
        """Yields the same requests at every rate, only faster. Another `draw` has other requests."""
        timing, prompting, answering, picking, coupling = (
            np.random.default_rng([draw, kind]) for kind in range(1, 6)
        )
        prompts: I64 = self.sides.prompt.draw(prompting, count)
        outputs: I64 = self.sides.output.draw(answering, count)
        if self.alike:
            outputs = coupled(prompts, outputs, self.alike, coupling)
        urgent = picking.random(count) < self.urgent
        times = arrivals(self.gaps, Steps(np.array([rate])), timing)
        drawn = zip(times, prompts.tolist(), outputs.tolist(), urgent.tolist(), strict=False)
        for at, prompt, output, first in drawn:
            yield WorkloadRequest(at=at, model=MODEL, prompt=prompt, output=output, priority=-first)


SHAREGPT: Final = Traffic("ShareGPT", STAND_INS["sharegpt-gpt4"], (7.0, 7.25, 7.5, 7.75, 8.0), alike=ALIKE)
BURSTGPT: Final = Traffic("BurstGPT", STAND_INS["burstgpt"], (7.5, 7.75, 8.0, 8.25, 8.5), alike=ALIKE)
SIZES_OF: Final = {"S": STAND_INS["zipf-s"], "M": STAND_INS["zipf-m"], "L": STAND_INS["zipf-l"]}
RATES: Final = {
    "S-S": (32.0, 33.0, 34.0, 35.0, 36.0),
    "M-M": (7.4, 7.5, 7.6, 7.7, 7.8),
    "L-L": (2.6, 2.7, 2.8, 2.9, 3.0),
    "S-L": (4.1, 4.15, 4.2, 4.25, 4.3),
    "L-S": (10.0, 12.0, 14.0, 16.0, 18.0),
}


def synthetic(prompt: str, output: str) -> Traffic:
    """Returns the workload with such prompts and answers, each S, M or L. It has no rates if the paper does
    not play it."""
    name = f"{prompt}-{output}"
    threshold = LONG_THRESHOLD if name in ("M-M", "S-L") else THRESHOLD
    sides = Sides(SIZES_OF[prompt].prompt, SIZES_OF[output].output)
    return Traffic(name, sides, RATES.get(name, ()), threshold=threshold)


SHORT, MEDIUM, LONG = (synthetic(size, size) for size in "SML")
TRAFFICS: Final = (SHAREGPT, BURSTGPT, MEDIUM, LONG)  # of which the curves are known
_FORM: Final = "ShareGPT, BurstGPT and prompt=X,output=Y are right, X and Y each S, M or L"


def read_traffic(text: str) -> Traffic:
    """Returns what `--traffic` names. Raises ConfigError."""
    for known in (SHAREGPT, BURSTGPT):
        if text.casefold() == known.name.casefold():
            return known
    sides = dict(part.partition("=")[::2] for part in text.split(","))
    if sides.keys() != {"prompt", "output"} or not set(sides.values()) <= SIZES_OF.keys():
        raise ConfigError(f"--traffic {text[:40]!r}: unknown; {_FORM}")
    return synthetic(sides["prompt"], sides["output"])


def chosen_traffic(options: Options, own: Sequence[Traffic]) -> Sequence[Traffic]:
    """Returns the workload that the reader has chosen, or the experiment's own ones."""
    return own if options.traffic is None else (read_traffic(options.traffic),)


def chosen_rates(options: Options, traffic: Traffic, own: Sequence[float]) -> Sequence[float]:
    """Returns the reader's rates, or the experiment's own ones. Raises ConfigError if there are neither."""
    if options.rates or own:
        return options.rates or own
    raise ConfigError(f"--traffic: the paper has no rates of {traffic.name}; --rate N says one")
