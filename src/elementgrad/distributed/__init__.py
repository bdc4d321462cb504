"""A whole Jacobian, block by block: here, on workers of any engine, or straight to disk."""
