"""The contents of the page of a fleet that serves: samples of it, and the lives of its requests."""
