"""The tables of verbs and of routes against what they stand for."""

from __future__ import annotations

import inspect
from types import NoneType
from typing import Any, get_type_hints

import pytest

from kvloom.api.admin_routes import ADMIN, UNIT_VERBS
from kvloom.api.auth import ADMIN_PATH, is_admin
from kvloom.api.errors import VERBS_PATH
from kvloom.api.routes import PUBLIC, Caller, RouteRow
from kvloom.types.client import EngineClient
from kvloom.types.verbs import VERBS, Done, RemoteEngine, Verb

ROWS = (*PUBLIC, *ADMIN, *UNIT_VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_a_verb_is_the_engines_method(verb: Verb[Any, Any]) -> None:
    method = getattr(EngineClient, verb.name)
    hints = get_type_hints(method)
    assert hints.pop("return") == (NoneType if verb.answer is Done else verb.answer)
    if verb.reports:
        assert not hints
    elif verb.spread:
        assert list(hints) == list(verb.body.__struct_fields__)
    else:
        assert list(hints.values()) == [verb.body]


def test_every_method_of_an_engine_is_a_verb() -> None:
    methods = {name for name, _ in inspect.getmembers(EngineClient, inspect.isfunction) if name[0] != "_"}
    assert methods == {verb.name for verb in VERBS} | {"start_generate"}
    assert methods == {name for name in vars(RemoteEngine) if name[0] != "_"} - {"call"} | {"start_generate"}


def test_a_row_stands_once() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) == len({(row.method, row.path) for row in ROWS})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_admins_have_the_paths_that_need_their_key(row: RouteRow) -> None:
    assert (row.caller is Caller.ADMIN) == is_admin({"path": row.path})
    paths = ADMIN_PATH + "/", VERBS_PATH + "/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert (row.caller is Caller.ADMIN) == row.path.startswith(paths)
