"""Edits of single elements, `eg.at(x)[i].set(v)` and the like, and the learned choice of one, `eg.choose`."""
