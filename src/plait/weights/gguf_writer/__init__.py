"""Writes GGUF files: which keys an architecture has, which type each tensor gets, and the file itself."""
