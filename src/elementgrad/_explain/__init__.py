"""`eg.explain` and `eg.check`: why a gradient is missing, zero, NaN or wrong.

`api.py` runs the function once under the backend, which records every operation (`trace.py` is the interface). The
framework's own gradient gives the verdict. Then `blame.py` looks for the operation to blame: it walks the recorded
graph (`path.py`) to where the path is cut, or asks the trace to follow tangents and cotangents through the same
operations again. `probe.py` settles what a record cannot, by running the function at other numbers and in other
precisions. `diagnosis.py` is the answer, and `causes.py` has the words for each cause.

`check.py` compares entries of a derivative with differences of values, as `differences.py` judges them.
`dependence.py` helps backends to find which elements of an operation's output depend on which of its inputs.
"""
