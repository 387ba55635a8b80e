"""The training loop of `recipes/train.py`, with Fabric and with the Trainer."""
