"""Weaver (Gao et al., ATC 2025): the experiments of its sections 2.3 and 5."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.report import Experiment
from kvloom.lab.reproduce.weaver.ablation import figure_7
from kvloom.lab.reproduce.weaver.adaptive import share_auto
from kvloom.lab.reproduce.weaver.ranks import table_1
from kvloom.lab.reproduce.weaver.sensitivity import figure_5
from kvloom.lab.reproduce.weaver.serving import figure_4, figure_6

EXPERIMENTS: Final = (
    Experiment("table-1", table_1),
    Experiment("4", figure_4),
    Experiment("5", figure_5),
    Experiment("6", figure_6),
    Experiment("7", figure_7),
    Experiment("auto", share_auto),
)
