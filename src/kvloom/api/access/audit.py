"""The audit trail: who has changed what of a fleet, and what it was before and after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.types import Message, Scope

from kvloom.api.access.tenants import access_of
from kvloom.cluster.state import FleetSpec
from kvloom.types.errors import KvloomError

FLEET: Final = "fleet"
"""The caller that knows the fleet's own secret, which is its scheduler."""
_ASKED: Final = "kvloom.asked"
_COUNTERS: Final = frozenset({"revision", "changed", "edition"})  # of edits, and no one's wish
_log = logging.getLogger(__name__)


def note(scope: Scope, body: object) -> None:
    """Notes what a request asks, once its body is understood."""
    scope.setdefault("state", {})[_ASKED] = body


def asked(scope: Scope) -> Any:
    """Returns what `note` has noted, or None."""
    return scope.get("state", {}).get(_ASKED)


def to_log(line: str) -> None:
    """Writes a line of the trail to the log. There, lines that come by the hundred are folded."""
    _log.info("audit: %s", line)


@dataclass(frozen=True, slots=True)
class Audit:
    """Writes a line of JSON for each action."""

    write: Callable[[str], object] = to_log
    """Takes a line. It neither blocks nor raises."""

    @contextmanager
    def action(
        self, scope: Scope, spec: Callable[[], FleetSpec | None]
    ) -> Iterator[Callable[[Message], None]]:
        """Writes a line for the action that the block carries out, also if it fails or is cut off, unless no
        body was understood. Yields a function that is to be shown each message of the answer: its status may
        tell of a failure that was answered inside the block. spec: tells the fleet's specification, of which
        the parts that differ afterwards are written; somebody else's changes at the same time are among them.

        What the fleet's own processes do is written only if it has changed the specification.
        """
        at, begun, before = datetime.now(UTC), time.monotonic(), _parts(spec())
        failed: str | None = "cut off"
        refused: str | None = None

        def look(message: Message) -> None:
            nonlocal refused
            if message.get("status", 0) >= 400:
                refused = f"status {message['status']}"

        try:
            yield look
            failed = refused
        except KvloomError as error:
            failed = error.message
            raise
        except Exception as error:
            failed = type(error).__name__
            raise
        finally:
            said = asked(scope)
            was, became = _differences(before, _parts(spec()))
            who = access_of(scope).admin
            if said is not None and (who != FLEET or was != became):
                client = scope.get("client")
                self._line(
                    at,
                    who=who,
                    address=client[0] if client else None,
                    what=f"{scope['method']} {scope['path']}",
                    asked=_shown(said),
                    before=was,
                    after=became,
                    error=failed,
                    seconds=round(time.monotonic() - begun, 3),
                )

    def keys_changed(self, file: str, before: list[str], after: list[str]) -> None:
        """Writes that a file of keys was changed, by whoever may write to it."""
        self._line(datetime.now(UTC), who=None, address=None, what=file, before=before, after=after)

    def _line(self, at: datetime, **fields: object) -> None:
        line = {"at": at.isoformat(timespec="milliseconds"), **fields}
        self.write(msgspec.json.encode(line).decode())


def _shown(body: Any) -> object:
    """Returns what was asked. Of a verb it is only whose it was: its prompt belongs in no trail."""
    if hasattr(body, "request"):
        return {name: getattr(body, name) for name in ("request", "model") if hasattr(body, name)}
    return msgspec.to_builtins(body)


def _parts(spec: FleetSpec | None) -> dict[str, object]:
    """Returns the parts of a specification, each of which is replaced when it changes."""
    if spec is None:
        return {}
    return {name: getattr(spec, name) for name in spec.__struct_fields__} | {"units": dict(spec.units)}


def _differences(before: object, after: object) -> tuple[object, object]:
    """Returns of two values what is not in the other one, field by field."""
    if before is after or before == after:
        return None, None
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    if not (isinstance(before, dict | msgspec.Struct) and isinstance(after, dict | msgspec.Struct)):
        return old, new
    was: dict[str, object] = {}
    became: dict[str, object] = {}
    for name in {**old, **new}:
        if name in _COUNTERS or old.get(name) == new.get(name):
            continue
        one, other = _differences(old.get(name), new.get(name))
        was[name], became[name] = one, other
    return was or None, became or None
