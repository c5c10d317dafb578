"""The GPU executor: real models over a torch device, its partitions, graphs and memory."""
