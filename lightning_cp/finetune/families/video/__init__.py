"""Families of pipelines that make clips, with or without sound."""
