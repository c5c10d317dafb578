"""Deciding for the fleet: which engine does what. No torch. What a program needs is here."""

from kvloom.router.held import PeerReservation as Spot
from kvloom.router.replicas import Fleet, Replica
from kvloom.router.session import Session as Call
from kvloom.types.client import Frames

__all__ = ["Call", "Fleet", "Frames", "Replica", "Spot"]
