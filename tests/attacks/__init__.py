"""Attacks on a real fleet, by command: `python -m tests.attacks`. Not part of the test suite."""
