"""Requests made from a description or a trace, and what became of them."""
