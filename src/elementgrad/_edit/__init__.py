"""Edits of named elements, `eg.at(x)[i].set(v)` and the like, and `eg.choose`, the learned choice of an element.

`edit.py` checks the value against the tensor and the selection, and builds every edit from the backend's `take`, `put`,
`where` and `stop`. Elements that are not named are copied and never computed with, so a NaN among them reaches neither
the result nor its gradient. While `torch.compile` traces, an edit whose index is not normal yet runs as one opaque
step. What frameworks do differently, such as accumulating at traced indices, is the `EditBackend` (`backend.py`).
"""
