"""Fleets of several hosts: who may speak to whom, and the process that keeps a host's part of the fleet."""
