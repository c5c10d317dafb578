"""Lengths of published traces, as distributions that have their percentiles and means.

The percentiles are those that papers and data sets publish, but for P10: that is chosen so that the mean is
right. Of ShareGPT as MuxServe uses it and of ChatLMSYS only the means are published; their spread is a guess.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvloom.workload.tokens import LogNormal, Percentiles, Tokens, Zipf

_LONGEST: Final = 6144  # of Llumnix's sequences


class Sides(NamedTuple):
    prompt: Tokens
    output: Tokens


def _same(tokens: Tokens) -> Sides:
    return Sides(tokens, tokens)


STAND_INS: Final[dict[str, Sides]] = {
    # MuxServe, section 2.1: means 161 and 338, prompts of 4 to 1,024 tokens
    "sharegpt": Sides(LogNormal(90, 1.4, 4, 1024), LogNormal(230, 1.0, 4, 2044)),
    # Llumnix, table 1: conversations with GPT-4
    "sharegpt-gpt4": Sides(
        Percentiles(((50, 74), (80, 348), (95, 1484), (99, 3388)), _LONGEST),
        Percentiles(((10, 140), (50, 487), (80, 781), (95, 988), (99, 1234)), _LONGEST),
    ),
    # Llumnix, table 1: BurstGPT, the requests to GPT-4
    "burstgpt": Sides(
        Percentiles(((10, 115), (50, 582), (80, 1427), (95, 2345), (99, 3549)), _LONGEST),
        Percentiles(((10, 40), (50, 243), (80, 434), (95, 669), (99, 964)), _LONGEST),
    ),
    # Azure Public Dataset, the conversations of 2023
    "azure-conversation": Sides(
        Percentiles(((25, 396), (50, 1020), (80, 1315), (90, 2734), (95, 4083), (99, 4142)), 14050),
        Percentiles(((25, 85), (50, 129), (80, 400), (90, 424), (95, 451), (99, 601)), 1000),
    ),
    # MuxServe, section 4.3: means 100 and 261
    "chatlmsys": Sides(LogNormal(50, 1.3, 4, 1024), LogNormal(168, 1.0, 4, 2044)),
    # Llumnix, table 1: short, medium and long
    "zipf-s": _same(Zipf(128, 2.0, _LONGEST)),
    "zipf-m": _same(Zipf(256, 1.5, _LONGEST)),
    "zipf-l": _same(Zipf(512, 1.15, _LONGEST)),
}
