"""Equal weights on all ranks: shared at the start, followed when they change, and refused where they differ."""
