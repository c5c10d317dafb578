"""`kvloom top`: a fleet that serves, seen in a terminal."""
