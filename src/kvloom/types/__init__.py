"""The types that cross borders between rooms: requests, verbs, jobs, loads, errors and time."""
