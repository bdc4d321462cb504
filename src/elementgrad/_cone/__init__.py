"""Cones: named elements at the cost of what they depend on.

1. A backend records the user's function as a `Program`: the framework's own operations, in order, on tensors that have
   a shape and no numbers.
2. Each operation relates its result to its operands axis by axis (`maps.py`): a convolution by windows, a softmax by
   whole axes, a reshape by blocks. An operation without a rule relates everything to everything. `rules.py` has the
   kinds of rules.
3. `plan.py` walks the program backwards once, from the box of the named elements to the box that each operation needs
   of its operands. The same relations read forwards give the elements that an input can reach.
4. `cost.py` compares the work of that cone with the work of the whole, before anything has run.
5. The backend runs the operations again on these boxes, above its own differentiation, so that every derivative rule
   is the framework's own.
"""
