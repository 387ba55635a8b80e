"""The measurements for one GPU (`lightning-cp bench bench=gpu`): stages, the runner, and the page they fill."""
