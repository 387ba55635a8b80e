"""Placement of a pipeline's weights: offloading between stages of a call, sharding over ranks."""
