"""Compute the feed-forwards of blocks in tiles of tokens."""
