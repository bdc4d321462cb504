"""One package per framework, and what they share.

`base.py` has the interface of a framework, `Backend`: operations on tensors, `linearize`, and what its compiler needs.
What only one verb needs is an interface in that verb's folder (`_place/edit.py`, `_names/backend.py`,
`_read/backend.py`, `_explain/backend.py`, `_train/trainer.py`), implemented by one class per framework. `registry.py`
finds the backend of a tensor by its type, among the frameworks that are already imported: none is imported for it.

Each package has the same files: `tensor.py` (the `Backend`), `autodiff.py` (its `Linearization`), `isolate.py` (runs
that leave no trace), `names.py`, `read.py`, `sparsity.py`, `explain.py`, `top.py`, `train/`, and
`_compat.py`, the only place that imports private names of the framework.
"""
