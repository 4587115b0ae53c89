"""From a recording to kernels: fused operations, a lowered list with its memory, and the executor that runs it."""
