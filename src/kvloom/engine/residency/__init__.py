"""Whose weights are in memory: the policy, and what carries it out."""
