"""Cached prefixes in files."""
