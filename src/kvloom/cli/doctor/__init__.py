"""`kvloom doctor`: what this machine has for kvloom, and what it lacks."""
