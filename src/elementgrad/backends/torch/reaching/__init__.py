"""Which entries of a Jacobian can be nonzero: a reverse sweep is watched, operation by operation."""
