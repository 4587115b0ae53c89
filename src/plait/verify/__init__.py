"""Parity with a reference implementation, token by token: what `plait verify` does, as functions."""
