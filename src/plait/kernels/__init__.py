"""Native kernels and what the machine offers them. Importing this package imports nothing else."""
