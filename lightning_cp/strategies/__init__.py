"""Common code of the strategies for Fabric and the Trainer; the strategies are in `fabric.py` and `pytorch.py`."""
