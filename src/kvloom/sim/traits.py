"""What kind of run with faults a seed stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.cost.shape import ModelShape
from kvloom.sim.dice import Dice

VOCAB: Final = 500
LONGEST: Final = 4.0  # seconds in which clients come


class Traits(Dice):
    """Drawn first: models, and how wide all else is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = seed
        draw = self._random
        self.shapes = {name: self._shape() for name in ("ash", "birch", "cedar")[: draw.randint(1, 3)]}
        self.lasting = self._odds(0.35)  # answers are long
        self.contexts = {
            name: draw.choice((80, 100) if self.lasting else (24, 48, 80)) for name in self.shapes
        }
        self.prefixes = [self._tokens(draw.randint(3, 60)) for _ in range(draw.randint(1, 3))]
        self.span = draw.choice((0.02, 0.3, 1.0, LONGEST))
        self.hasty = self._odds(0.3)  # many hang up, and links are slow
        self.cramped = self._odds(0.4)  # prompts are long, and pools hold one or two
        self.calm = self._odds(0.2)  # nobody dies, and no call is lost
        self.served = 0.9  # of the models, by each unit
        self.odd = 0.05  # of the units, those with blocks of their own size
        self.delays: Sequence[float] = (0.0001, 0.0003, 0.02)
        self.scheduled = 0.7  # of the fleets of several units
        self.rooms: Sequence[float] = (1.0, 1.0, 1.2, 1.6, 2.1) if self.cramped else (0.6, 1.0, 1.4, 3.0, 8.0)
        self.paces: Sequence[float] = (1e-3, 3e-3) if self.lasting else (1e-5, 1e-4, 1e-3)
        self.links: Sequence[float] = (3e3, 1e4) if self.hasty else (1e4, 1e5, 1e6, 1e9)
        self.crowd = (4, 8 if self.lasting else 16)  # clients
        self.answers: Sequence[int] = (5, 30, 40) if self.lasting else (1, 2, 5, 12)

    def _shape(self) -> ModelShape:
        draw = self._random
        return ModelShape(
            layers=draw.randint(1, 3),
            hidden=16,
            heads=2,
            kv_heads=draw.randint(1, 2),
            head_dim=draw.choice((4, 8)),
            ffn=16,
            vocab=VOCAB,
        )

    def prompt(self, length: int) -> list[int]:
        """Of at most `length` tokens; mostly it begins as others do."""
        draw = self._random
        length = draw.randint(max(1, length // 2) if self.cramped else 1, max(1, length))
        begin = draw.choice(self.prefixes)[: draw.randint(0, length)] if self._odds(0.8) else []
        return [*begin, *self._tokens(length - len(begin))]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]
