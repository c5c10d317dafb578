"""One validated config, and the file that it comes from."""
