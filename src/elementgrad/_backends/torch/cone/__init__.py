"""Cones of PyTorch programs.

`program.py` records a function on tensors without numbers, and runs parts of what it recorded above autograd;
`calls.py` has the recorded calls. `rules.py` has the table of operations, which `arithmetic.py`, `windows.py` and
`moves.py` fill with rules of the kinds of `_cone/rules.py`. To add an operation, find the relation of its result to
each operand in `_cone/maps.py`, and register it with `@rule("name")`; `tests/cone` holds every rule against the whole
operation.
"""
