"""The application behind `lightning-cp` and `recipes/`: digits data, settings, runs, plots and benchmarks.

No code outside this folder imports it. It needs the packages of the extra `recipes`.
"""
