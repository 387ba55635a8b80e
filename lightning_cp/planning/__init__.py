"""Dry runs of the engine on tensors without storage: what a step needs with given degrees, and which degrees to use."""
