"""What elementgrad raises: one base class, and each message says what was given, what fits and what to try."""

from typing import Any


class ElementgradError(Exception):
    """Base of every error that elementgrad raises itself.

    >>> import elementgrad as eg
    >>> try:
    ...     eg.Selection.resolve((0, 812), shape=(100, 768))
    ... except eg.ElementgradError as error:
    ...     print(error)
    [0, 812]: index 812 is out of range for axis 1 of size 768
    """

    __init__ = Exception.__init__  # by this sign tf.function knows that it may raise the same type again


class SelectionError(ElementgradError, IndexError):
    """An index does not fit its tensor: out of range, too many axes, a mask of another shape, not an index at all."""


class DuplicateError(ElementgradError, ValueError):
    """An element is named twice where it may be named only once."""


class BroadcastError(ElementgradError, ValueError):
    """A value does not broadcast to the elements it is meant for."""


class DtypeError(ElementgradError, TypeError):
    """A dtype cannot do what was asked, such as an integer tensor where a gradient is needed."""


class FrameworkError(ElementgradError, TypeError):
    """Not a tensor of PyTorch, TensorFlow or JAX, or tensors of two of them mixed."""


class PlaceError(ElementgradError, ValueError):
    """A place cannot be used this way, such as editing one that has a name but no tensor."""


class ParseError(PlaceError):
    """The text of a place does not parse; the message marks the character."""


class TracedError(ElementgradError, TypeError):
    """The answer depends on values that are being traced and cannot be read."""


class BatchError(ElementgradError, ValueError):
    """What was said to be a batch of independent examples is none."""


class OptionError(ElementgradError, ValueError):
    """An option of a call has a value that it cannot have."""


class SizeError(ElementgradError, MemoryError):
    """What is asked for is larger than the memory that is free."""


class WorkerError(ElementgradError, RuntimeError):
    """A worker was lost, again and again or with its whole pool, and what it was to do is not done."""


class PatchError(ElementgradError, ValueError):
    """A patch, or the file of one, does not hold together: damaged, of another kind, or at odds with itself."""


class PatternError(ElementgradError, ValueError):
    """A sparsity pattern misses entries that are not zero, or none can be found that holds everywhere."""


class UnconnectedError(ElementgradError, ValueError):
    """The framework's derivative program has no path between two tensors: there is no gradient, not a gradient of zero.

    >>> import torch, elementgrad as eg
    >>> eg.grad(lambda x: x.detach().sum(), torch.ones(2))
    Traceback (most recent call last):
    elementgrad.errors.UnconnectedError: output does not depend on x ...
    """

    loss: Any = None
    """The loss without a gradient, where a training verb was given one."""
    leaf: Any = None
    """The elements without one; None if the loss has none at all."""

    def about(self, loss: Any, leaf: Any = None) -> "UnconnectedError":
        """The same error, which knows what it is about. Not told as it is made: see `ElementgradError`."""
        self.loss, self.leaf = loss, leaf
        return self
