"""Processes: how one starts, from a fork server or anew, what it is told and logs, and work under limits."""
