"""Settings of lightning-cp bench: a folder of its own, since `bench=` is one group of settings for all of it."""
