"""Prompts of samples during training: read them from the settings or a file, and encode them once."""
