"""The answers of the tour on PyTorch, a module for each chapter."""
