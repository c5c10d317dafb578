"""Measures this machine for the simulator: jobs alone, jobs beside other work, and the server's own CPU
time."""
