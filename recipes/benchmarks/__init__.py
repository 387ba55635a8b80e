"""Measure subjects that do the same work, one after the other, and report the results: see `lightning-cp bench`."""
