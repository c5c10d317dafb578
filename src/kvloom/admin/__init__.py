"""Administering a fleet that serves, from the command line."""
