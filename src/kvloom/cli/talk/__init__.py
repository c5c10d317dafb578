"""`kvloom chat`, `kvloom run` and `kvloom models`: a server's models are asked from a terminal."""
