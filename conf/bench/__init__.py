"""Settings of recipes/bench.py: a folder of its own, since `bench=` is one group of settings for all of it."""
