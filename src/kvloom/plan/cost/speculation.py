"""The gain and the cost of drafted tokens (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", ICML 2023, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.plan.cost.work import CostModel, Work
from kvloom.types.spec import MOST_DRAFTED, MOST_ROWS


def tokens_per_step(acceptance: float, drafted: int) -> float:
    """Returns the tokens that a step is expected to give which verifies so many drafted ones, each of them
    right with probability `acceptance` if those before it are: (1 - a^(k+1)) / (1 - a), their equation 1."""
    if acceptance >= 1.0:
        return drafted + 1.0
    return (1.0 - acceptance ** (drafted + 1)) / (1.0 - acceptance)


def drafted_step(
    cost: CostModel, model: str, share: float, contexts: Sequence[int], drafted: int, draft: str | None
) -> float:
    """Returns the seconds of a step that verifies so many drafts of each sequence, and of drafting them.
    `contexts` are the tokens that each sequence holds. `draft` is the model that drafts, in one step for each
    draft; it is None if n-grams do, which cost nothing."""
    verifying = cost.seconds(Work.verify(model, share, contexts, drafted))
    if draft is None or not drafted:
        return verifying
    return verifying + drafted * cost.seconds(Work.decode(draft, share, contexts))


def seconds_per_token(
    cost: CostModel, model: str, share: float, contexts: Sequence[int], acceptance: float, draft: str | None
) -> float:
    """Returns the seconds that a token of each sequence takes, with as many drafts as pay best, or none."""
    most = min(MOST_DRAFTED, MOST_ROWS // len(contexts) - 1)
    return min(
        drafted_step(cost, model, share, contexts, drafted, draft) / tokens_per_step(acceptance, drafted)
        for drafted in range(max(0, most) + 1)
    )
