"""Samples of `lightning-cp train` and `lightning-cp sample`: files, contact sheets and digit recognition."""
