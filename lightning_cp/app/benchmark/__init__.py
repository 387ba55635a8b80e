"""What `recipes/bench.py` is made of: subjects that do the same work, measured in turn, and what is made of it."""
