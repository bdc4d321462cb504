"""Training of single elements of PyTorch parameters."""
