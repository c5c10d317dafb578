"""Tokens grow, and what was seen of them stays as it was."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.sequence import TokenBuffer
from kvloom.types.geometry import I64

IDS = st.integers(0, 2**31 - 1)


@given(prompt=st.lists(IDS, min_size=1, max_size=40), output=st.lists(IDS, max_size=70), data=st.data())
def test_views_stay_true_while_the_output_grows(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    tokens = TokenBuffer(np.array(prompt, dtype=np.int64))
    seen: list[tuple[I64, list[int]]] = []
    whole = list(prompt)
    for token in [*output, None]:
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, len(whole)))
        seen += [(tokens.output, whole[len(prompt) :]), (tokens.between(start, end), whole[start:end])]
        if token is not None:
            tokens.append(token)
            whole.append(token)
    assert tokens.length == len(whole)
    assert tokens.prompt.tolist() == prompt
    assert all(view.tolist() == then for view, then in seen)


def test_choices_share_their_prompt_and_nothing_else() -> None:
    prompt = np.array([3, 1, 4], dtype=np.int64)
    one, two = TokenBuffer(prompt), TokenBuffer(prompt)
    one.append(1)
    two.append(5)
    assert one.prompt is two.prompt
    assert (one.between(2, 4).tolist(), two.between(2, 4).tolist()) == ([4, 1], [4, 5])
