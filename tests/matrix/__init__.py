"""One behaviour matrix: every form of model x every operation."""
