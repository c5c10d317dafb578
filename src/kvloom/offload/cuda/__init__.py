"""Offloaded attention between two units of one GPU."""
