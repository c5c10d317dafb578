"""Decode steps as jobs: a job of several steps, or of one step that verifies drafted tokens."""
