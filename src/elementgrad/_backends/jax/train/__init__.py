"""Training of single elements of pytrees."""
