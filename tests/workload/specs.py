"""Specs as the tests write them."""

from __future__ import annotations

from kvloom.workload.ask import Ask
from kvloom.workload.make import make_asks
from kvloom.workload.spec import WorkloadSpec

Settings = dict[str, object]


def spec(**settings: object) -> WorkloadSpec:
    """Of 60 s of models a and b, with short prompts, but for `settings`."""
    given: Settings = {
        "models": ["a", "b"],
        "rate": 20,
        "seconds": 60,
        "lengths": {"prompt": [5, 40], "output": [1, 20]},
    }
    return WorkloadSpec.model_validate(
        {key: value for key, value in (given | settings).items() if value is not ...}
    )


def asks(**settings: object) -> list[Ask]:
    return list(make_asks(spec(**settings)))
