"""Aegaeon (Xiang et al., SOSP 2025): more models than memory, at low rates, beside what it publishes."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.aegaeon.pooling import arithmetic, pooling
from kvloom.lab.reproduce.report import Experiment

EXPERIMENTS: Final = (Experiment("active-models", arithmetic), Experiment("models-a-gpu", pooling))
