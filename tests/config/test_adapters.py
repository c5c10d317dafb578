"""Adapters in a config: they are served wherever their base is, and are on no unit themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.types.spec import AdapterSpec
from tests.config.configs import load, refused

MODELS = "models: {a: ./model, b: ./other, s: {base: a, adapter: ./lora}, t: {base: a, adapter: ./lora}}\n"


@pytest.fixture(autouse=True)
def lora(folder: Path) -> Path:
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text("{}")
    return folder / "lora"


def test_adapters_are_served_where_their_base_is(folder: Path, lora: Path) -> None:
    for units in ("", "units: [{models: [a]}, {models: [a, b]}]\n"):
        for engine in load(folder, MODELS + units).engines:
            names = {model.name: model.adapters for model in engine.models}
            assert names["a"] == (AdapterSpec("s", str(lora)), AdapterSpec("t", str(lora)))
            assert not names.get("b")
            assert engine.served == {*names, "s", "t"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {a: ./model, s: {base: a}}", "models.s: one of `base` and `adapter`; an adapter has both"),
        ("models: {a: ./model, s: {adapter: ./lora}}", "models.s: one of `base` and `adapter`"),
        ("models: {a: ./model, s: {base: a, adapter: ./lora, rate: 2}}", "models.s: rate beside `adapter`"),
        (
            "models: {a: ./model, s: {base: a, adapter: ./lora, path: ./other}}",
            "models.s: path beside `adapter`",
        ),
        ("models: {a: ./model, s: {base: a, adapter: ./empty}}", "holds no adapter_config.json"),
        ("models: {abc: ./model, s: {base: abd, adapter: ./lora}}", "models.s.base: no model 'abd'; did you"),
        (
            "models: {a: ./model, s: {base: a, adapter: ./lora}, t: {base: s, adapter: ./lora}}",
            "models.t.base",
        ),
        (
            "models: {s: {base: s, adapter: ./lora}}",
            "models.s.base: no model 's'; a model that is no adapter",
        ),
        (MODELS + "units: [{models: [a, b, s]}]", "units.0.models: 's' is an adapter"),
        (
            MODELS + "units: [{models: [a, b], tensor_parallel: 2}]",
            "models.s.adapter: units.0 has 2 ranks on",
        ),
        (
            MODELS + "units: [{models: [a]}, {models: [b]}]\nweave: [{hot: unit-1, cold: unit-0}]",
            "models.s.adapter: units.0 has 1 ranks on cpu, and weaves",
        ),
    ],
)
def test_what_is_refused(folder: Path, text: str, said: str) -> None:
    assert said in refused(folder, text)
