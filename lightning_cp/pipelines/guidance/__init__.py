"""Guidance on several ranks: branches of classifier-free guidance, their samples, and ControlNets."""
