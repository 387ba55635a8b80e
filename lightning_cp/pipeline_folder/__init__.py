"""Read what the files of a pipeline's folder say. Nothing here imports torch or diffusers, or loads weights."""
