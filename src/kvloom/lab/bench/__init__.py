"""Benchmarks that ask a server."""
