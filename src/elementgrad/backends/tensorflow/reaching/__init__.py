"""Which entries of a Jacobian can be nonzero, found from the program of a reverse sweep of TensorFlow."""
