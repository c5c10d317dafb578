"""A System for Microserving of LLMs (Jin et al., 2024): the experiments of its section 4."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.microserving.load import figure_10, figure_11, figure_13
from kvloom.lab.reproduce.microserving.migration import figure_12, table_3
from kvloom.lab.reproduce.report import Experiment

EXPERIMENTS: Final = (
    Experiment("10", figure_10),
    Experiment("11", figure_11),
    Experiment("12", figure_12),
    Experiment("table-3", table_3),
    Experiment("13", figure_13),
)
