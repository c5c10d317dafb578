"""Clients that people use, each by its own package, against a served fleet."""
