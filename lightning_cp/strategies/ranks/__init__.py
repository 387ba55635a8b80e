"""Start the ranks of a strategy on this machine."""
