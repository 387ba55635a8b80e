"""The longest clip that can be trained at a fixed memory per rank, counted on tensors without storage."""
