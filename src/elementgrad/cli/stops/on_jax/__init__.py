"""The answers of the tour on JAX, a module for each chapter."""
