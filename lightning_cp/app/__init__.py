"""The application behind `recipes/`: the digits that they train on, their settings, runs, plots and benchmarks.

Nothing outside of this folder imports it. It needs the packages of the extra `recipes`.
"""
