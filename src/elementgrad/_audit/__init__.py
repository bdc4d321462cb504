"""`eg.audit`: every parameter of a model, does it learn, and if not, why.

`api.py` has the backend (`backend.py` is its interface) run the loss and one reverse sweep, which leaves a small
`GradientSummary` of each parameter. `survey.py` sorts the parameters by these numbers alone: most models are fine, and
nothing else runs for them. Otherwise the loss runs once more under the recorder of `eg.explain`. `groups.py` finds
which parameters share a cause, by where the recorded path ends, and asks for one explanation in each group. `units.py`
follows single rows and channels to the operation that loses their gradient. `custom_rules.py` compares derivatives that
the user wrote with differences. `result.py` is the answer.
"""
