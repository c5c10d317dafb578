"""Specs as the tests write them."""

from __future__ import annotations

from kvloom.lab.workload.make import make_requests
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.spec import WorkloadSpec

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


def asks(**settings: object) -> list[WorkloadRequest]:
    return list(make_requests(spec(**settings)))
