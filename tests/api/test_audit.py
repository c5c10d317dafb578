"""The audit trail: a line for each order, with who, what, before and after, and without any secret."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from kvloom.api.access.audit import Audit
from kvloom.api.access.keyring import KeyRing
from kvloom.api.auth import Keys
from kvloom.config.keys import make_key
from kvloom.types.errors import Unavailable
from tests.api.fleet import Administered, Curt, administered

ADMIN = {"authorization": "Bearer boss-key"}
SECRET = {"authorization": "Bearer fleet-secret"}
PROGRAM = {"name": "balanced", "options": {"ratio": 0.2}}


class Trail:
    """A fleet whose trail is a list."""

    def __init__(self, engine: Curt | None = None, **fields: Any) -> None:
        self.text, key = make_key("ops", admin=True)
        self.written: list[str] = []
        given: Any = {"admin": frozenset({"boss-key"}), "ring": KeyRing({"ops": key})} | fields
        self.fleet: Administered = administered(
            keys=Keys(secret="fleet-secret", **given), engine=engine, audit=Audit(self.written.append)
        )
        self.http = TestClient(
            self.fleet.app, base_url="http://localhost", client=("10.1.2.3", 5), raise_server_exceptions=False
        )

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> int:
        headers = headers or {"authorization": f"Bearer {self.text}"}
        return self.http.post(path, json=body, headers=headers).status_code

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.written]


def test_who_has_changed_what() -> None:
    trail = Trail()
    assert trail.post("/admin/units/unit-0/drain", {"seconds": 0}) == 200
    assert trail.post("/admin/units/unit-0/admit", {}, ADMIN) == 200
    assert trail.post("/admin/program", PROGRAM) == 200
    assert trail.post("/admin/units/unit-0/drain", {}, SECRET) == 200
    drained, admitted, program, fleets = trail.lines
    assert drained.keys() == {
        *("at", "who", "address", "what", "asked", "before", "after", "error", "seconds"),
    }
    assert (drained["who"], drained["address"]) == ("ops", "10.1.2.3")
    assert drained["what"] == "POST /admin/units/unit-0/drain"
    assert drained["asked"] == {"seconds": 0.0}
    assert drained["before"] == {"units": {"unit-0": {"drained": None}}}
    assert drained["after"] == {"units": {"unit-0": {"drained": True}}}
    assert drained["error"] is None
    assert (admitted["who"], admitted["after"]) == ("a key of admin_key_file", drained["before"])
    assert (program["before"], program["after"]) == ({"program": None}, {"program": PROGRAM})
    assert fleets["who"] == "fleet"
    for line in trail.written:
        assert "\n" not in line
        for secret in (trail.text, "boss-key", "fleet-secret"):
            assert secret not in line


def test_what_fails_is_written_too() -> None:
    trail = Trail()
    trail.fleet.problems["unit-0"] = "no such luck"
    assert trail.post("/admin/units/unit-0/restart", {"seconds": 0}) == 503
    (line,) = trail.lines
    assert "no such luck" in line["error"]
    assert line["after"]["units"]["unit-0"]["generation"] == 2


def test_what_changes_nothing_is_not_written() -> None:
    trail = Trail()
    key = {"authorization": f"Bearer {trail.text}"}
    for path in ("/admin/units", "/admin/program", "/verbs/unit-0/load", "/verbs/unit-0/health"):
        assert trail.http.get(path, headers=key).status_code == 200
    assert trail.post("/admin/units/unit-0/drain", {"seconds": "x"}) == 400
    assert trail.post("/admin/units/unit-9/drain", {}) == 404
    assert trail.post("/admin/nothing", {}) == 404
    assert trail.post("/verbs/unit-0/abort", {}) == 400
    assert trail.post("/admin/units/unit-0/drain", {}, {"authorization": "Bearer wrong"}) == 401
    assert trail.post("/admin/pairs", {"pairs": [], "seconds": 1.0}, SECRET) == 200
    assert trail.post("/admin/scale", {"start": [], "stop": []}, SECRET) == 200
    assert trail.post("/admin/config", {"wanted": {"units": []}, "really": False}) in (200, 400)
    assert trail.written == []
    assert trail.post("/admin/pairs", {"pairs": [], "seconds": 1.0}) == 200
    assert [line["what"] for line in trail.lines] == ["POST /admin/pairs"]


def test_verbs_are_written_without_prompts() -> None:
    trail = Trail()
    start = {"model": "tiny", "request": "r-1", "prompt": [70, 71], "sampling": {"max_tokens": 1, "seed": 0}}
    assert trail.post("/verbs/unit-0/start_generate", start) == 200
    assert trail.post("/verbs/unit-1/abort", {"request": "r-1"}) == 200
    generated, aborted = trail.lines
    assert generated["asked"] == {"request": "r-1", "model": "tiny"}
    assert (aborted["what"], aborted["asked"]) == ("POST /verbs/unit-1/abort", {"request": "r-1"})
    assert (aborted["before"], aborted["after"], aborted["error"]) == (None, None, None)


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("a bug")])
def test_verbs_that_fail_are_written_too(error: Exception) -> None:
    trail = Trail(Curt(fails=lambda verb: error if verb == "abort" else None))
    assert trail.post("/verbs/unit-0/abort", {"request": "r-1"}) >= 500
    (line,) = trail.lines
    assert line["error"] == ("status 503" if isinstance(error, Unavailable) else "RuntimeError")


def test_without_keys_the_address_says_who(caplog: pytest.LogCaptureFixture) -> None:
    """And without a file the log has the line."""
    fleet = administered(keys=Keys())
    http = TestClient(fleet.app, base_url="http://localhost", client=("127.0.0.1", 5))
    with caplog.at_level("INFO"):
        assert http.post("/admin/units/unit-0/drain", json={}).status_code == 200
    (said,) = (one.getMessage() for one in caplog.records if one.getMessage().startswith("audit: "))
    line = msgspec.json.decode(said.removeprefix("audit: "))
    assert (line["who"], line["address"]) == (None, "127.0.0.1")


def test_a_changed_file_of_keys_is_written() -> None:
    written = list[str]()
    Audit(written.append).keys_changed("/etc/keys.yaml", ["a"], ["a", "b"])
    line = msgspec.json.decode(written[0])
    assert (line["what"], line["before"], line["after"]) == ("/etc/keys.yaml", ["a"], ["a", "b"])
