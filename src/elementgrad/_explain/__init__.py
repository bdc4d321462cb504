"""`eg.explain` and `eg.check`: why a gradient is missing, zero, NaN or wrong.

`api.py` has the backend run the function once and record every operation with its tensors (`trace.py` is the interface:
`Op`, which has a jvp, a vjp and a rerun of its own, and `Record`). `connect.py` finds the values that the derivative
connects with the source, and why it ends at others. The framework's own gradient gives the verdict. Then `blame.py`
looks for the operation to blame: it walks the recorded graph (`path.py`) to where the path is cut, or compares
tangents, cotangents and masks of elements that `replay.py` follows through the record. `kinds.py` says why nothing
leaves one operation, by its kind and its numbers, and has the table of kinds. `probe.py` settles what a record cannot,
by running the function at other numbers or in another precision. `diagnosis.py` is the answer, and `causes.py` has the
words for each cause.

`check.py` compares entries of a derivative with differences of values, as `differences.py` judges them. `dependence.py`
finds which elements of an operation's results depend on which of its operands, and `provenance.py` where a tensor from
before a training step came from.
"""
