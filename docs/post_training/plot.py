"""Plot the rewards that flow_grpo.py has written: `python plot.py rewards.png "single=a.csv" "ring 2=b.csv"`."""

import csv
import sys

from matplotlib.figure import Figure

figure = Figure(figsize=(6, 3.2), layout="constrained")
axes = figure.subplots()
for style, argument in zip(("-", "--", ":"), sys.argv[2:], strict=False):
    label, _, path = argument.partition("=")
    with open(path) as file:
        rows = list(csv.DictReader(file))
    axes.plot([int(row["iteration"]) for row in rows], [float(row["reward"]) for row in rows], style, label=label)
axes.set_xlabel("iteration")
axes.set_ylabel("mean reward")
axes.set_ylim(0, 1)
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(sys.argv[1], dpi=110)
