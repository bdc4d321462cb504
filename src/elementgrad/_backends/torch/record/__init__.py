"""Recordings of eager PyTorch code (`eg.record`).

Proxies. A recorded tensor that requires gradients stands for itself. A plain one gets a `Proxy`: a tensor over the same
memory with a place in the autograd graph. A `TorchFunctionMode` (`recorder.py`) sees each call of the user's code and
passes the proxy, or a view of it, wherever an argument lies in recorded memory; results are swapped back. So autograd
builds a graph, although nothing about the user's tensors changes. `intercept.py` covers the calls that the mode misses.

Writes. A `TorchDispatchMode` sees each op below autograd, whose schema says which tensors it writes. Before a write
`SavedTensors` copies what autograd saved in that storage; after the call `WriteHistory` (`writes.py`) appends a
`TensorVersion` with the new edge of the graph to the storage's history (`ProxiedStorage` if it has recorded tensors).

Versions. A request names elements of a tensor, and maybe which write of them. `StorageHistory` (`history.py`) finds for
each element the version that wrote it last before the target's version did. `RecordedLinearization`
(`linearization.py`) sweeps from the target's edges back to the edges of these versions.
"""
