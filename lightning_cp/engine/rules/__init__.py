"""A plan compiled for one model: which module is found by each entry, and what happens there."""
