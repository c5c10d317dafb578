"""How often a seeded token changes if its context is computed again, and how long a draw takes.

python -m benchmarks.draws [--tokens 10000000]. Half of the tokens are drawn from the logits of a small model
that were computed step by step, and the other half, with the same seeds, from logits that a prefill of the
same contexts gave. The model's weights are random, so its logits are multiplied until they spread as those of
a trained one do. Times are of 96 rows over 150,000 tokens on one core, the best of several runs, for logits
that are normal, of which thousands matter, and for logits that fall with the logarithm of their rank, as
those of a trained model do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels import best
from benchmarks.places import checkpoint
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
from kvloom.exec.sampler import draw
from kvloom.kernels.cpu.draw import prepare
from kvloom.kernels.draw_reference import streams
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64
from kvloom.types.spec import ModelSpec

TOKENS = 10_000_000
ROWS, VOCABULARY = 96, 150_000
SHAPE = "C"  # a vocabulary of 32,000
BLOCK, PROMPT, STEPS, BYTES = 1 << 14, 48, 16, 256
SPREAD = 3.0  # standard deviation of logits
MOST_TIME, MOST_CHANGED = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Filters:
    """The sampling parameters of a draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def of(self, logits: Tensor, stream: Tensor) -> Tensor:
        """Draws a token from each row."""
        numbers = (self.temperature, self.top_k, self.top_p, self.min_p)
        temperature, top_k, top_p, min_p = (torch.full((len(logits),), number) for number in numbers)
        return draw(logits, temperature, top_k, top_p, min_p, stream)


KINDS: Mapping[str, Filters] = {
    "no filter": Filters(),
    "temperature 0.6": Filters(0.6),
    "top-k 50": Filters(top_k=50),
    "min-p 0.05": Filters(min_p=0.05),
    "top-p 0.95": Filters(top_p=0.95),
    "top-p 0.8": Filters(top_p=0.8),
    "temperature 0.6, top-k 20, top-p 0.95": Filters(0.6, 20, 0.95),
}


class _Batch:
    """Contexts of one model, each of them twice: the second is numbered ROWS higher."""

    def __init__(self) -> None:
        path = str(checkpoint(SHAPE))
        model = load_model(ModelSpec(name="m", path=path, dtype="float32"), BLOCK, CPU)
        longest, geometry = PROMPT + STEPS, model.geometry
        arena = Arena(2 * ROWS * geometry.blocks(longest), BLOCK)
        self._view = arena.view(geometry.head_dim, model.kv_dtype)
        pool = Pool(arena.blocks, {"m": geometry}, max_sequences=2 * ROWS, max_tokens={"m": longest})
        self._cache, self._forward = pool.caches["m"], model.forward
        for sequence in range(2 * ROWS):
            self._cache.add_sequence(sequence)

    def append(self, sequences: Sequence[int], count: int, tokens: I64, rows: I64) -> Tensor:
        """Returns the logits of `rows` of the tokens, of which each sequence takes `count`."""
        plan = self._cache.begin_forward(sequences, [count] * len(sequences))
        with torch.inference_mode():
            logits = self._forward(tokens, rows, ForwardState(plan, self._view)).clone()
        self._cache.end_forward(plan)
        return logits


def recomputed() -> tuple[Tensor, Tensor]:
    """Returns logits [STEPS, ROWS, V] by decode steps, and those of the same contexts by prefills."""
    batch = _Batch()
    tokens: I64 = np.random.default_rng(0).integers(0, BYTES, (ROWS, PROMPT + STEPS))
    for row in range(ROWS):
        batch.append([row], PROMPT, tokens[row, :PROMPT], np.array([PROMPT - 1]))
    every = np.arange(ROWS)
    steps = [batch.append(range(ROWS), 1, tokens[:, PROMPT + i], every) for i in range(STEPS)]
    late, length = np.arange(PROMPT, PROMPT + STEPS), PROMPT + STEPS
    whole = [batch.append([ROWS + row], length, tokens[row], late) for row in range(ROWS)]
    logits, again = torch.stack(steps), torch.stack(whole, 1)
    factor = SPREAD / logits.std()
    return logits * factor, again * factor


def changed(filters: Filters, logits: Tensor, again: Tensor, tokens: int, seed: int) -> int:
    """Returns how many of so many tokens, half of them from logits computed again, differ from the other
    half's."""
    found = 0
    for turn in range(-(-tokens // (2 * ROWS))):
        stream = torch.from_numpy(streams(np.arange(ROWS) + seed * ROWS, np.full(ROWS, turn)))
        one, other = (filters.of(either[turn % STEPS], stream) for either in (logits, again))
        found += int((one != other).sum())
    return found


def distance(logits: Tensor, again: Tensor) -> float:
    """Returns the mean distance in total variation of the distributions of which tokens are drawn without
    filters: two draws of one seed differ at least that often, whatever way they are drawn."""
    apart = [
        (one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1)
        for one, other in zip(logits, again, strict=True)
    ]
    return 0.5 * float(torch.stack(apart).mean())


def normal() -> Tensor:
    """Returns logits that are normal."""
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * SPREAD


def ranked() -> Tensor:
    """Returns logits that fall by 1.5 times the logarithm of the rank, with noise."""
    generator = torch.Generator().manual_seed(1)
    ranks = torch.stack([torch.randperm(VOCABULARY, generator=generator) + 1.0 for _ in range(ROWS)])
    return 1.5 * (torch.randn(ROWS, VOCABULARY, generator=generator) - ranks.log())


def milliseconds(filters: Filters, logits: Tensor, seconds: float) -> float:
    """Returns the time of a draw from all rows, the best of those that fit into `seconds`."""
    stream = torch.from_numpy(streams(np.arange(ROWS), np.zeros(ROWS)))
    return best(lambda turn: filters.of(logits, stream + turn), seconds) * 1e3


def measure(tokens: int = TOKENS, seconds: float = 2.0) -> Report:
    machine = this_machine()
    prepare()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flat, peaked = (
            {name: milliseconds(filters, logits, seconds) for name, filters in KINDS.items()}
            for logits in (normal(), ranked())
        )
        pairs = recomputed()
        share = -(-tokens // len(KINDS))
        counts = {n: changed(one, *pairs, share, seed) for seed, (n, one) in enumerate(KINDS.items())}
    finally:
        torch.set_num_threads(threads)
    rows: list[list[Cell]] = [[name, share, counts[name], flat[name], peaked[name]] for name in KINDS]
    without = sum(counts[name] for name, filters in KINDS.items() if filters.top_p == 1.0)
    least = distance(*pairs) * tokens / 2
    return Report(
        name="draws",
        title="Draws: seeded tokens after a recomputed context, and 96 rows over 150,000 tokens on one core",
        columns=["", "tokens", "changed", "ms, normal", "ms, by rank"],
        rows=rows,
        findings=[
            Finding(what="tokens changed", value=float(sum(counts.values())), most=MOST_CHANGED),
            Finding(what="tokens changed without top-p", value=float(without), most=0.0),
            Finding(
                what="the slowest draw",
                value=max(*flat.values(), *peaked.values()),
                unit=" ms",
                most=MOST_TIME,
            ),
        ],
        machine=machine,
        notes=[
            f"Without filters at least {least:.1f} of {tokens:,} tokens change on average, whatever way they "
            "are drawn: so far apart, in total variation, are the distributions of the two computations."
        ],
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    publish(measure(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
