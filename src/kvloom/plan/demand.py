"""What is wanted of one model."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.cost.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate` requests a second of `prompt` tokens, answered with `output` tokens, both means. path: the
    checkpoint, where there is one."""

    name: str
    shape: ModelShape
    rate: float
    prompt: float
    output: float
    path: str | None = None

    @property
    def flops(self) -> float:
        """Of one request: two for each weight and token, and attention's four for each pair and number of a
        head."""
        tokens = self.prompt + self.output
        shape = self.shape
        layer = shape.attention_parameters + shape.active * shape.expert_parameters
        dense = 2.0 * (shape.layers * layer + shape.vocab * shape.hidden) * tokens
        return dense + 2.0 * shape.layers * shape.heads * shape.head_dim * tokens * tokens

    @property
    def compute(self) -> float:
        """FLOP a second: rate × scale of the model, the order in which algorithm 1 places models."""
        return self.rate * self.flops
