"""Recordings of eager PyTorch code."""
