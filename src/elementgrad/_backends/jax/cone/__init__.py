"""Cones of JAX programs.

`program.py` traces a function to its jaxpr and compiles a part of it for all positions at once: the sizes of all
regions are fixed, and where they start is an operand. Each region lies inside of its tensor, so that a region holds
nothing but values of the whole. `rules.py`, `windows.py`, `moves.py` and `custom.py` relate each primitive's result to
its operands and run it on regions; `trace.py` has the equations in order, and `templates.py` the sizes of regions. A
primitive without a rule runs on whole tensors.
"""
