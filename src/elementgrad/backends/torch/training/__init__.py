"""Training some elements of a PyTorch model: leaves of their own, kernels for their gradients, tensors kept current."""
