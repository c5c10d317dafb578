"""Models that make vectors of texts: what their files say of them, and how they run."""
