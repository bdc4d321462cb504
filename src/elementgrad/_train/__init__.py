"""Training single elements: `eg.trainable`, `eg.top`, and patches: `eg.apply`, `eg.diff`, `eg.merge`.

`eg.trainable` (api.py) resolves places to elements of parameters (routing.py), and returns them as `Elements`
(elements.py). For each place the framework's `Trainer` (trainer.py) makes an `ElementGroup`: positions in the
parameter, the original values, and the leaf, a vector of its own that an optimizer moves. The parameters themselves are
frozen, but for those that `keep=` names (keep.py), and a `PartialParameter` knows the groups of one of them. The
backend copies a trained value from the leaf into the parameter: in PyTorch after each optimizer step and before each
forward, in Keras with every write to the leaf; in JAX `elements.merge` returns new parameters. Layers compute the
gradients of the elements alone where they can (kernels.py), and gather them from a dense gradient otherwise.

A patch is the difference: entries (entries.py) with values, originals and a fingerprint of the tensor (fingerprint.py),
as a value that composes, inverts and merges (patch.py), and as a safetensors file (patch_file.py, gaps.py). Training
makes one, and so does `eg.diff` of two sets of weights (diff.py). Others are read and written as well (formats.py).
`eg.apply` checks one against the model (match.py) and the history of its changes (history.py). Weights in a file
(weights.py) or a folder of shards (folder.py) are a model as well. `top.py` finds places that are worth training, by
the interface of top_backend.py. Numbers are compared and cast by their bits (bits.py).
"""
