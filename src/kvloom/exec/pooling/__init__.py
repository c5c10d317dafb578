"""Models that make vectors of texts: how their files are read, and how they run."""
