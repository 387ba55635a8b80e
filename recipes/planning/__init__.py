"""The recipe of the planner: its settings, its table, and measurements of this machine's rates."""
