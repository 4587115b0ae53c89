"""Measurements: our side and a peer's, alternating in one run, beside the machine's own limits."""
