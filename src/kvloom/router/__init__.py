"""Deciding for the fleet: which engine does what. No torch."""
