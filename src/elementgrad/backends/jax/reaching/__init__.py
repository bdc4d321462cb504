"""Which entries of a Jacobian can be nonzero, found from JAX's own derivative program."""
