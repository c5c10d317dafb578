"""Deciding for the fleet: which engine does what. No torch. What a program needs is here."""

from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.replica import Replica
from kvloom.router.spot import Spot

__all__ = ["Call", "Fleet", "Frames", "Replica", "Spot"]
