"""Compare the arguments of forwards, and weights, between the ranks of a context group."""
