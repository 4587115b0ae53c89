"""Training: data, optimisers, schedule, precision, loop, checkpoints, evaluation."""
