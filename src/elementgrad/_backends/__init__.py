"""One package per framework, and what they share.

`base.py` has the interface of a framework, `Backend`: operations on tensors, `linearize`, and what its compiler needs.
What only one verb needs is an interface in that verb's folder (`_place/edit.py`, `_names/backend.py`,
`_read/backend.py`, `_explain/backend.py`, `_train/trainer.py`), implemented by one class per framework. `registry.py`
finds the backend of a tensor by its type, among the frameworks that are already imported: none is imported for it.
`source_location.py` finds the user's line in a stack of frames, and `reachable_state.py` restores objects of the user
in which a recording left tensors without numbers.

Each package has the same files: `tensor.py` (the `Backend`), `autodiff.py` (its `Linearization`), `isolate.py` (runs
that leave no trace), `_compat.py` (the only place that imports private names of the framework), and one file or folder
for each verb: `names.py`, `read.py`, `sparsity.py`, `cone/`, `trace.py` and `explain.py`, `audit.py`, `watch.py`,
`top.py` and `train/`. Tables of operations that are long have a file of their own, such as `sparsity_rules.py`. What
only one framework needs is described in its `__init__.py`.
"""
