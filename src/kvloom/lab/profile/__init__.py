"""How long the real executor of this machine takes for jobs."""
