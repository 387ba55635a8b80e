"""Samples of `recipes/train.py` and `recipes/sample.py`: files, contact sheets and digit recognition."""
