"""The stages of a sample: the components of a pipeline, and their memory and time."""
