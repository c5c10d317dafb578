"""Llumnix (Sun et al., OSDI 2024): experiments of its section 6."""

from __future__ import annotations

from typing import Final

from kvloom.reproduce.llumnix.downtime import figure_10
from kvloom.reproduce.llumnix.priorities import section_64
from kvloom.reproduce.llumnix.scaling import section_65
from kvloom.reproduce.llumnix.serving import figure_11
from kvloom.reproduce.llumnix.stress import section_66
from kvloom.reproduce.report import Experiment

EXPERIMENTS: Final = (
    Experiment("10", figure_10),
    Experiment("11", figure_11),
    Experiment("section-6.4", section_64),
    Experiment("section-6.5", section_65),
    Experiment("section-6.6", section_66),
)
