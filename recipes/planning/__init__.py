"""The recipe of the planner: its settings, its table and plot, and measurements of the best layouts."""
