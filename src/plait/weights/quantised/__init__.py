"""Quantised Hugging Face checkpoints: a file per format, and the source that shows several stored tensors as one."""
