"""Real models on a GPU: one executor over a torch device, its partitions, graphs and memory."""
