"""Anthropic's Messages API, another face of the same requests."""
