"""`eg.watch`: stop a training run at its first bad number, and say which, why and where.

While the run is healthy, a backend (`_backends/*/watch.py`) keeps only references to the arguments of the forward, the
random state and small copies of buffers, and looks at one norm of all outputs, one of all gradients and one of all
parameters. Only when one of these is not finite, or a rule of the user's is true, the forward and its backward
run again under the recorder of `eg.explain`. `locate.py` searches that record for the earliest bad value: arguments and
parameters first, then results in the order of the program, then gradients in the order of the backward. `elements.py`
finds and names the bad element of a tensor. `report.py` has the words, and `capture.py` the file from which the same
step runs again. `api.py` puts them together.
"""
