"""The experiments, their tables and their plots."""
