"""The measurements for one GPU (`python recipes/bench.py bench=gpu`): stages, the runner, and the page they fill."""
