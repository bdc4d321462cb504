"""Cones of TensorFlow programs.

`program.py` traces a function into a graph, and runs parts of that graph eagerly under a tape. `layer_state.py`
restores the attributes of layers that were traced. `rules.py` has the table of operations, which `arithmetic.py`,
`windows.py` and `moves.py` fill with rules of the kinds of `_cone/rules.py`. To add an operation, find the relation of
its result to each operand in `_cone/maps.py`, and register it with `@rule("Type")`; `tests/cone` holds every rule
against the whole operation.
"""
