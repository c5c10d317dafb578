"""What a page shows of a fleet while it serves: samples of it, and the lives of its requests."""
