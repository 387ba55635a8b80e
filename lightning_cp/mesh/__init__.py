"""Which ranks share a sample, and how its tokens are divided between them."""
