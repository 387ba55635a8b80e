"""Settings of lightning-cp check: its own folder, so that `model=` is a file and no group of lightning-cp train."""
