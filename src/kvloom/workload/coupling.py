"""Long prompts that have long answers."""

from __future__ import annotations

import math

import numpy as np

from kvloom.types.geometry import I64


def coupled(prompts: I64, outputs: I64, rank: float, rng: np.random.Generator) -> I64:
    """The same outputs, in an order in which their rank correlation with the prompts is about `rank`, in
    [-1, 1]: normal scores of both have the joint distribution that gives it (Iman and Conover, "A
    distribution-free approach to inducing rank correlation among input variables", 1982)."""
    together = 2 * math.sin(math.pi * rank / 6)  # of normal scores, for Spearman's coefficient
    of_prompts = np.sort(rng.standard_normal(prompts.size))[_ranks(prompts)]
    others = rng.standard_normal(prompts.size)
    of_outputs = together * of_prompts + math.sqrt(1 - together**2) * others
    reordered: I64 = np.sort(outputs)[_ranks(of_outputs)]
    return reordered


def _ranks(values: np.ndarray) -> I64:
    order: I64 = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return order
