"""Settings of recipes/plan.py: a folder of its own, so that `model=` is a name and no group of recipes/train.py."""
