"""One model over several ranks: weights sliced by the checkpoint's own plan, and their partial products
summed (tensor parallelism; Shoeybi et al., Megatron-LM, 2019, section 3)."""
