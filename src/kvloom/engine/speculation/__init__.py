"""Speculative decoding: what is drafted, how much of it, and what of it counts."""
