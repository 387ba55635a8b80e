"""The strategies for Fabric and for the Trainer, without Lightning's base classes: see `fabric.py` and `pytorch.py`."""
