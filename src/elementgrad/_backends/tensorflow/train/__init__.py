"""Training of single elements of Keras variables."""
