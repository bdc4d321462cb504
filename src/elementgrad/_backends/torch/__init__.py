"""The PyTorch backend.

A function is evaluated once, eagerly and isolated, and its autograd graph is kept for all reverse sweeps; a stack of
seeds runs as one sweep under vmap. Forward sweeps are the transposes of reverse ones where these can be differentiated,
and else evaluations with dual tensors. Named values are captured by hooks on modules, and parameters are replaced in
the modules that hold them. Explanations and recordings watch the code run through function and dispatch modes.

`record/` is `eg.record`. `uses.py` reads some elements of a parameter without its whole derivative, `axis_matrices.py`
has the matrices of pools and resized images for cones and patterns, and `distributed.py` trains under `fully_shard` and
`DistributedDataParallel`.
"""
