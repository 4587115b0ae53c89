"""Training: data, optimisers, the step, the loop, checkpoints."""
