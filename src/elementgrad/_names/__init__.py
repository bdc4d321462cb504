"""Names: which tensor of a function call `of` and `wrt` mean.

`BoundCall` (`call.py`) binds a function to its arguments (`arguments.py`) and names every tensor in these trees
(`pytree.py`): `x`, `params.weight`, `xs.0`. A model adds the tensors that it holds and its layers, through the
backend's `Model` (`backend.py`). A name becomes a `TensorRef`: an input, a tensor of the model, or a value that exists
only while the function runs, such as the output, the result of a layer, or what the user named by `eg.tag`.

`BoundCall.run` calls the function with some of these tensors replaced and returns others. Values of the run are
intercepted by a `Capture` (`capture.py`): wherever a named value is computed, by a layer or by `eg.tag` (`tag.py`), it
is handed to the capture of the thread, which may replace it, keep it, or stop the run there (`stopping.py`).
`PartialCall` is such a run as a function from tensors to tensors, which a backend can linearize; an `Operand` is one
side of the Jacobian that is then read. `names.py` has `eg.names`, which lists all of this, and the patterns over it.
"""
