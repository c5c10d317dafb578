"""`kvloom profile`: how long this machine's real executor takes for jobs."""
