"""Settings of lightning-cp check-family."""
