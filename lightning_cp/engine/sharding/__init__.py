"""Shard arguments to this rank's tokens, and gather outputs."""
