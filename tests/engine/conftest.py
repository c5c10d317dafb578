"""What several of the engine's tests share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.engine.batching.view import ModelView
from kvloom.engine.model_queue import CachedView, model_view
from tests.engine.real_fleet import Fleet, make_fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(autouse=True)
def _kept_views_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test: what a policy is shown is what it would be shown if it were looked at anew."""
    kept = CachedView.at

    def at(self: CachedView, now: int) -> ModelView:
        told, (fresh, since) = kept(self, now), model_view(self._queue)
        assert told == replace(fresh, waited=0 if since is None else now - since)
        return told

    monkeypatch.setattr(CachedView, "at", at)
