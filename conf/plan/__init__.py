"""Settings of lightning-cp plan: a folder of its own, so that `model=` is a name and no group of lightning-cp train."""
