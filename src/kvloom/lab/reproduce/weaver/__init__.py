"""Weaver (Gao et al., ATC 2025): the experiments of its section 5."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.report import Experiment
from kvloom.lab.reproduce.weaver.sensitivity import figure_5, figure_7
from kvloom.lab.reproduce.weaver.serving import figure_4, figure_6

EXPERIMENTS: Final = (
    Experiment("4", figure_4),
    Experiment("5", figure_5),
    Experiment("6", figure_6),
    Experiment("7", figure_7),
)
