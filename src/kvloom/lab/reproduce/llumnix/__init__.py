"""Llumnix (Sun et al., OSDI 2024): the experiments of its sections 3 and 6."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.llumnix.curves import CURVES
from kvloom.lab.reproduce.llumnix.downtime import figure_10
from kvloom.lab.reproduce.llumnix.engine_alone import figure_3, figure_5
from kvloom.lab.reproduce.llumnix.fragmentation import figure_12
from kvloom.lab.reproduce.llumnix.priorities import section_64
from kvloom.lab.reproduce.llumnix.scaling import section_65
from kvloom.lab.reproduce.llumnix.serving import figure_11
from kvloom.lab.reproduce.llumnix.stress import section_66
from kvloom.lab.reproduce.report import Experiment

EXPERIMENTS: Final = (
    Experiment("3", figure_3),
    Experiment("5", figure_5),
    Experiment("10", figure_10),
    Experiment("11", figure_11, figure_11, ("traffic", "rates", "draws", "requests"), CURVES),
    Experiment("12", figure_12, figure_12, ("traffic", "rates", "requests")),
    Experiment("section-6.4", section_64),
    Experiment("section-6.5", section_65, section_65, ("rates", "thresholds", "requests")),
    Experiment("section-6.6", section_66, timed=True),
)
