"""Real digits, the example of `recipes/train.py`: data, denoisers, the family of their runs, and a classifier."""
