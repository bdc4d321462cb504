"""Expected results of the tour: the founding numbers, and those of the usual answers."""

FOUNDING = {
    "replaced": ["[1, 2, 10, 4]", "[1, 1, 0, 1], 1", "78", "[0, 4, 6, 8], 14"],
    "alone": ["[0, 0, 6, 0]"],
    "stepped": ["[1, 1.6, 3, 4]"],
    "itself": ["[[0, 0, 0], [0, 0, 1], [0, 0, 0]]", "[[1, 1, 1], [1, 1, 1], [1, 1, 1]]"],
    "product": ["[[5, 7], [0, 0]]", "7"],
    "second": ["8"],
    "uses": ["2", "1", "3"],
    "twice": ["6", "6"],
    "own_rule": ["4", "agrees"],
    "written": ["111"],
    "three_ways": ["[6, 0, 0]"] * 4,
    "element_zero": ["[6, 0, 0]"],
}
"""On every framework."""

MISLED = {
    "everywhere": {
        "alone": ["[0, 0, 6, nan]"],
        "stepped": ["[0.8, 2, 2.4, 3.2]"],
        "product": ["16", "[[5, 7], [0, 0]]"],
        "entry": ["0", "999", "999", "999"],
    },
    "torch": {
        "twice": ["6", "12"],
        "message": ["element 0 of tensors does not require grad and does not have a grad_fn", "0"],
    },
    "tensorflow": {"itself": ["None", "None"], "written": ["None"], "element_zero": ["None"], "choice": ["None"]},
    "jax": {"written": ["0"], "message": ["0"], "choice": ["[0, 0, 0]"]},
}
"""What the usual answers give where they do not raise."""

NOT_TRACKED = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
RAISED = {
    "torch": {
        "replaced": "RuntimeError: a view of a leaf Variable that requires grad is being used in an in-place",
        "itself": NOT_TRACKED,
        "own_rule": "TypeError: save_for_backward can only save variables, but argument 1 is of type int",
        "written": "RuntimeError: The differentiated Tensor at index 0 appears to not have been used in the graph",
        "element_zero": NOT_TRACKED,
        "choice": NOT_TRACKED,
        "token": "ValueError: can't optimize a non-leaf Tensor",
    },
    "tensorflow": {
        "replaced": "EagerTensor' object does not support item assignment",
        "twice": "RuntimeError: A non-persistent GradientTape can only be used to compute one set of gradients",
        "own_rule": "ValueError: custom_gradient function expected to return 2 gradients, but returned 1 instead",
        "message": "ValueError: No gradients provided for any variable",
    },
    "jax": {
        "replaced": "TypeError: JAX arrays are immutable and do not support in-place item assignment",
        "itself": "TypeError: Gradient only defined for scalar-output functions",
        "own_rule": "TypeError: Custom VJP bwd rule must produce an output with the same container (pytree) structure",
        "token": "ValueError: The truth value of an array with more than one element is ambiguous",
    },
}
"""What they raise, as far as it is the same in every version."""
