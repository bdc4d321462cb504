"""Derivatives: the lazy Jacobian, the plan that it makes for each read, and the sweeps that carry it out."""
