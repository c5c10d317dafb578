"""Adapters over HTTP, in vLLM's words."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.auth import Keys
from kvloom.api.schemas.generation import ErrorAnswer
from kvloom.types.errors import BadRequest
from kvloom.types.spec import AdapterSpec
from tests.api.fleet import Administered, Curt, administered

KEYS = Keys({"user": None}, admin=frozenset({"admin"}))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GOOD = {"lora_name": "x", "lora_path": "/adapters/x"}


@pytest.fixture
def fleet() -> Administered:
    return administered(keys=KEYS)


@pytest.fixture
def http(fleet: Administered) -> TestClient:
    return TestClient(fleet.app, headers={"authorization": "Bearer admin"})


def kept(fleet: Administered) -> list[tuple[AdapterSpec, ...]]:
    return [unit.engine.models[0].adapters for unit in fleet.kept.units.values()]


def refused(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    return ErrorAnswer.model_validate(answer.json()).error.message


def test_an_adapter_comes_and_goes(http: TestClient, fleet: Administered) -> None:
    answer = http.post(LOAD, json=GOOD | {"base_model_name": "m", "load_inplace": False, "other": 1})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert kept(fleet) == [(AdapterSpec("x", "/adapters/x"),)] * 2
    said = refused(http.post(LOAD, json=GOOD), 400)
    assert said.startswith("The lora adapter 'x' has already been loaded")
    answer = http.post(UNLOAD, json={"lora_name": "x"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert kept(fleet) == [(), ()]
    assert refused(http.post(UNLOAD, json={"lora_name": "x"}), 404) == "The lora adapter 'x' cannot be found."


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        (GOOD | {"lora_name": "m"}, "m is the name of a model; another one is right"),
        (GOOD | {"lora_name": "a b"}, "lora_name: 'a b' is no name"),
        (
            GOOD | {"lora_path": "adapters/x"},
            "lora_path: 'adapters/x'; the path of a folder from the root on",
        ),
        (GOOD | {"lora_path": "/a\0b"}, "lora_path: "),
        (GOOD | {"load_inplace": True}, "load_inplace: no adapter takes another's place"),
        (GOOD | {"base_model_name": "huge"}, "base_model_name: no model 'huge'; served: m"),
        ({"lora_name": 1}, "body: Expected `str`, got `int` - at `$.lora_name`"),
    ],
)
def test_what_is_refused(http: TestClient, fleet: Administered, body: dict[str, Any], said: str) -> None:
    assert refused(http.post(LOAD, json=body), 400).startswith(said)
    assert kept(fleet) == [(), ()]


def test_a_unit_that_refuses_is_named() -> None:
    engine = Curt(lambda verb: BadRequest("models.x: NaN") if verb == "load_adapter" else None)
    fleet = administered(keys=KEYS, engine=engine)
    http = TestClient(fleet.app, headers={"authorization": "Bearer admin"})
    assert refused(http.post(LOAD, json=GOOD), 400) == "unit-0: models.x: NaN"
    assert kept(fleet) == [(), ()]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_they_need_an_admins_key(fleet: Administered, path: str) -> None:
    for headers in ({"authorization": "Bearer user"}, {}):
        assert TestClient(fleet.app, headers=headers).post(path, json=GOOD).status_code in (401, 403)
    assert kept(fleet) == [(), ()]
