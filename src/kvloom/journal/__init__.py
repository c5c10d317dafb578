"""The journal: what has happened to a fleet, and why. Those who decide write it as they decide."""
