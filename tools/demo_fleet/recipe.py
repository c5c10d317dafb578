"""What it takes to make one model of the fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.demo_fleet.sample import Sample


@dataclass(frozen=True)
class Phase:
    """A stretch of training, with its own text and its own optimizer."""

    draw: Callable[[Random], Sample]
    steps: int
    batch: int
    peak_lr: float


@dataclass(frozen=True)
class Recipe:
    """One model: its shape, its text, its training and its examination."""

    name: str
    architecture: Callable[..., Any]  # a transformers config class
    shape: dict[str, Any]
    template: str
    starts_with_bos: bool
    vocabulary: int
    phases: list[Phase]
    examine: Callable[[Any, Any], dict[str, float]]  # (model, tokenizer) -> scores
    examples: list[dict[str, Any]]  # prompts with what the answers must hold
    dtype: str
    sampling: dict[str, Any] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)  # extra tokens that stay visible in text
