"""Ollama's API, another face of the same requests."""
