"""MuxServe (Duan et al., ICML 2024): the experiments of its section 4, figure 3, what equation 3 foretells,
and policies over drawn workloads."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.muxserve.ablation import figure_3, figure_8, figure_9, figure_10
from kvloom.lab.reproduce.muxserve.drawn import foretold, overload, policies
from kvloom.lab.reproduce.muxserve.end_to_end import figure_5, figure_7, section_4_2
from kvloom.lab.reproduce.muxserve.replay import PUBLISHED_RUNS, replayed
from kvloom.lab.reproduce.report import Experiment

EXPERIMENTS: Final = (
    Experiment("3", figure_3),
    Experiment("section-3.3", foretold),
    Experiment("5", figure_5),
    Experiment("section-4.2", section_4_2),
    Experiment("7", figure_7),
    Experiment("7-replayed", replayed, published=PUBLISHED_RUNS),
    Experiment("8", figure_8),
    Experiment("9", figure_9),
    Experiment("10", figure_10),
    Experiment("policies", policies),
    Experiment("overload", overload),
)
