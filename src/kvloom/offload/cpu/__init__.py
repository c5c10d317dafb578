"""Offloaded attention between two CPU units of one host."""
