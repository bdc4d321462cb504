"""Names to tensors: the arguments of a call, tags and activations that a run captures, and the table of names."""
