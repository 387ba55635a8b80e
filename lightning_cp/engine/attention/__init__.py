"""Intercept the attention and dropout calls of a parallel model, and compute them across ranks."""
