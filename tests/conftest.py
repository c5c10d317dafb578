"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvloom", derandomize=True, deadline=None)  # the same examples in every run
settings.load_profile("kvloom")
