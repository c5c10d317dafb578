"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests import interpreter

# the same examples in every run, however slow the machine is
settings.register_profile(
    "kvloom", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvloom")

interpreter.watch()
