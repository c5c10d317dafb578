"""Attention over pages of K and V: a decode step, prompts, and the tiles that both are made of."""
