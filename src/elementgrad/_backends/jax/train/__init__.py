"""Training single elements of a pytree of arrays. JAX arrays are never written to, so nothing is copied back.

The leaf of a group is an array of its own, which the user optimises and `elements.merge` puts into new parameters.

`elements.grad` traces the loss as a program of the parameters and runs the program with a `PatchedArray` in place of
each parameter that has trained elements: the array as it is, the positions, and the leaves' values (trainer.py).
Operations that move elements move the positions along; lookups, products and convolutions add what the elements
contribute, and return plain arrays; for any other operation the array is made whole, which costs a dense gradient
(rules.py, products.py). Only the values are differentiated. `elements.plan` lists the operations.
"""
