"""Settings of recipes/check.py: a folder of its own, so that `model=` is a file and no group of recipes/train.py."""
