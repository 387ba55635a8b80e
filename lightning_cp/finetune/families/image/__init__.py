"""Families of pipelines that make pictures."""
