"""How long requests take that have the server to themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvloom.bench.endpoint import Endpoint, ServerError
from kvloom.types.clock import Clock
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.objectives import Alone
from kvloom.workload.traffic import ModelTraffic

_FIRST: Final = 1 << 62  # numbers of probes, so that no prompt is a workload's
_REPEATS: Final = 3


def probes(models: Mapping[str, ModelTraffic]) -> dict[str, tuple[Ask, Ask]]:
    """For each model a request with a short and one with a long prompt, both as the workload has them, and
    the usual answer."""
    found = {}
    for name, traffic in models.items():
        short, long = (max(1, int(tokens)) for tokens in traffic.prompt.quantiles((0.1, 0.9)))
        [output] = (max(2, int(tokens)) for tokens in traffic.output.quantiles((0.5,)))
        long = max(long, short + 1)
        found[name] = (
            Ask(at=0.0, model=name, prompt=short, output=output),
            Ask(at=0.0, model=name, prompt=long, output=output),
        )
    return found


async def measure(
    endpoint: Endpoint, pairs: Mapping[str, tuple[Ask, Ask]], clock: Clock, step: Callable[[str], None]
) -> dict[str, Alone]:
    """One request at a time, the fastest of a few. Raises ServerError where one fails."""
    found = {}
    for name, (short, long) in pairs.items():
        step(name)
        best: list[Outcome] = []
        for side, ask in enumerate((short, long)):
            outcomes = []
            for repeat in range(_REPEATS):
                body = endpoint.body(_FIRST + 2 * repeat + side, ask)
                outcomes.append(await endpoint.ask(ask, body, clock.now()))
            best.append(_fastest(outcomes))
        found[name] = fit(*best)
    return found


def fit(short: Outcome, long: Outcome) -> Alone:
    """From two answers without error."""
    firsts = [outcome.first or 0.0 for outcome in (short, long)]
    per_prompt = max(0.0, (firsts[1] - firsts[0]) / (long.ask.prompt - short.ask.prompt))
    start = max(0.0, firsts[0] - per_prompt * short.ask.prompt)
    return Alone(start, per_prompt, max(short.per_token or 0.0, long.per_token or 0.0))


def _fastest(outcomes: Iterable[Outcome]) -> Outcome:
    def latency(outcome: Outcome) -> float:
        if outcome.error or outcome.end is None:
            raise ServerError(f"{outcome.ask.model}: alone, too: {outcome.error or 'not one token came'}")
        return outcome.end

    return min(outcomes, key=latency)
