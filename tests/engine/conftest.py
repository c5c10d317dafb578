"""What several of the engine's tests share."""

from __future__ import annotations

import pytest

from kvloom.engine.batching.view import ModelView
from kvloom.engine.model_queue import BusyModels, model_view
from tests.engine.real_fleet import Fleet, make_fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(autouse=True)
def _kept_views_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test: what a policy is shown is what it would be shown if it were looked at anew."""
    kept = BusyModels.views

    def views(self: BusyModels) -> tuple[ModelView, ...]:
        told = kept(self)
        assert told == tuple(model_view(queue) for queue in self.places if queue.is_busy)
        return told

    monkeypatch.setattr(BusyModels, "views", views)
