"""Which entries of a Jacobian can be nonzero, and how few sweeps read them."""
