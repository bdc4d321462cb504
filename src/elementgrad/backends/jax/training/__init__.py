"""Training elements of pytrees of arrays: what they are merged into, and their gradients without dense ones."""
