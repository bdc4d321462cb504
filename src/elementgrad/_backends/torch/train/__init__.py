"""Training of single elements of PyTorch parameters.

`TorchTrainer` (`trainer.py`) checks, starts and stops training. Each trained place has a leaf: a small `nn.Parameter`
that holds the values of its elements (`TorchElementGroup`). The user's optimizer moves the leaf. The parameter is
frozen, stays in its module under its name, and always holds the values of its leaves: `TorchPartialParameter` copies
them in both directions (`parameter.py`).

1. `eg.trainable` freezes the model, adds the leaves to the modules that own the parameter, and gives those modules a
   subclass of their class (`modules.py`). Hooks on all optimizers are registered with the first trained element and
   removed with the last.
2. In a forward, such a module first calls `sync`: if a leaf changed, its values are copied into the parameter; if the
   parameter was written to, for instance by `load_state_dict`, they are copied into the leaves.
3. Layers with a kernel compute with the whole parameter and send a gradient to the leaves alone, which are one vector
   for autograd, and of which a kernel computes only the entries that train (`kernels.py`). All other modules get an
   alias of the parameter: its dense gradient exists for a moment, and the leaves take their entries from it.
4. The hook before an optimizer's step copies what was written to the parameter into the leaves; the hook after it
   copies the leaves into the parameter.
5. `release` copies once more, removes the leaves and restores the classes and the `requires_grad` flags.
"""
