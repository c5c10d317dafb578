"""What drafts tokens, in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.configs import load, refused

MODELS = "models: {a: {path: ./model, speculation: b}, b: ./other, c: ./model}\n"


def test_a_model_of_the_same_units_drafts(folder: Path) -> None:
    config = load(folder, MODELS + "units: [{models: [a, b], replicas: 2}, {models: [c]}]")
    for engine in config.engines:
        assert {model.name: model.draft for model in engine.models} in ({"a": "b", "b": None}, {"c": None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "models: {a: {path: ./model, speculation: d}}",
            "models.a.speculation: 'd' is to draft for it, and the",
        ),
        ("models: {a: {path: ./model, speculation: a}, b: ./other}", "models.a.speculation: 'a' is to draft"),
        (
            MODELS + "units: [{models: [a, b]}, {models: [a, c]}]",
            "and the unit has c; none, ngram or another model",
        ),
        (MODELS + "memory: 2GiB", "memory: b drafts for a on units.0, so that its weights must stay"),
        ("models: {a: {path: ./model, speculation: ''}}", "models.a.speculation"),
        ("models: {a: {path: ./model, acceptance: 1.5}}", "models.a.acceptance"),
    ],
)
def test_what_is_refused(folder: Path, text: str, said: str) -> None:
    assert said in refused(folder, text)
