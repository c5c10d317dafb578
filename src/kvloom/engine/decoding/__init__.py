"""How decode steps become jobs: several steps at once, or one that verifies drafted tokens."""
