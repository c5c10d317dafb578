"""How long prompts and answers are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import numpy as np
from pydantic import PlainValidator, ValidationInfo

from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64, AnyArray
from kvloom.workload.arrivals import in_pieces
from kvloom.workload.fields import LONGEST, Section, TokenCount, shown
from kvloom.workload.stand_ins import STAND_INS
from kvloom.workload.tokens import Tokens, Uniform

_AT_ONCE: Final = 1024
_TRIES: Final = 200  # draws of a chunk before its limits count as impossible


def _side(value: Any, info: ValidationInfo) -> Tokens:
    """A number of tokens, [least, most], or a stand-in's name."""
    if isinstance(value, str) and value in STAND_INS:
        tokens: Tokens = getattr(STAND_INS[value], str(info.field_name))
        return tokens
    ends = value if isinstance(value, list) else [value, value]
    whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if not whole or len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= LONGEST:
        known = ", ".join(STAND_INS)
        raise ValueError(f"{shown(value)}; a number of tokens, [least, most], or one of {known} is right")
    return Uniform(*ends)


Side = Annotated[Tokens, PlainValidator(_side)]


class Lengths(Section):
    """Prompts and answers, drawn independently; what is longer than a limit is drawn anew, as MuxServe drops
    it."""

    prompt: Side
    output: Side
    max_prompt: TokenCount | None = None
    max_total: TokenCount | None = None

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        """[count, 2]. Raises ConfigError where (nearly) nothing fits the limits."""
        kept: list[I64] = []
        left = count
        for _ in range(_TRIES):
            pairs = np.stack((self.prompt.draw(rng, count), self.output.draw(rng, count)), axis=1)
            kept.append(pairs[self._fits(pairs)][:left])
            left -= len(kept[-1])
            if left == 0:
                return np.concatenate(kept)
        raise ConfigError("lengths: hardly a request fits max_prompt and max_total; larger ones are right")

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Prompt and output tokens, without end."""
        while True:
            yield from in_pieces(self.draw(rng, _AT_ONCE))

    def _fits(self, pairs: I64) -> AnyArray:
        most, total = self.max_prompt or LONGEST, self.max_total or 2 * LONGEST
        fits: AnyArray = (pairs[:, 0] <= most) & (pairs.sum(axis=1) <= total)
        return fits
