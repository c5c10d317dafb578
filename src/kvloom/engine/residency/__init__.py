"""Which models' weights are in memory: the policy, and the code that carries it out."""
