"""Many units: what is to run, what does, and what makes the one the other."""
