"""The errors of elementgrad: one base class; each message says what was given, what fits and what to try."""

import re
import sys
import warnings
from importlib import import_module
from reprlib import repr as brief
from typing import Any

MESSAGE_LIMIT = 1000
"""Characters of a message. It may quote what was given, such as the text of a place, which may be of any length."""
LONG_WORD = re.compile(r"\S{250,}")
"""A word that is quoted from the user, since no word of ours is so long."""


def shortened(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Return a text without the middle of its long words, and of itself if it is still too long.

    >>> from elementgrad.errors import shortened
    >>> shortened(f"no tensor is named {'w' * 10**6}; nearest: weight").count("w")
    160
    """
    if len(text) <= min(limit, 250):
        return text
    text = LONG_WORD.sub(lambda word: _without_middle(word[0], 80, 80), text)
    return text if len(text) <= limit else _without_middle(text, limit // 4, limit // 2)


def _without_middle(text: str, start: int, end: int) -> str:
    return f"{text[:start]} ... ({len(text) - start - end} left out) ... {text[-end:]}"


def quoted(value: Any) -> str:
    """Return the repr of a value for a message, also where Python has none: too deep, or an int of too many digits."""
    try:
        return repr(value)
    except (RecursionError, ValueError):
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else _brief(value)


def _brief(value: Any) -> str:
    # `reprlib` may fail too, as for a list that holds such an int.
    try:
        return brief(value)
    except ValueError:
        return f"a {type(value).__name__}"


class ElementgradError(Exception):
    """Base of every error that elementgrad raises itself.

    >>> import elementgrad as eg
    >>> try:
    ...     eg.Selection.resolve((0, 812), shape=(100, 768))
    ... except eg.ElementgradError as error:
    ...     print(error)
    [0, 812]: index 812 is out of range for axis 1 of size 768
    """

    __init__ = Exception.__init__  # tf.function raises an error of the same type again if it has this very `__init__`

    def __str__(self) -> str:
        return shortened(super().__str__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class ElementgradWarning(UserWarning):
    """A call did what was asked, with a side effect that is easily missed.

    >>> import warnings, torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     elements = eg.trainable(model, "0.weight[0, 1]")
    >>> print(caught[0].category.__name__, str(caught[0].message)[:31])
    ElementgradWarning 1.weight, 1.bias trained before
    """


def warn(message: str) -> None:
    """Warn at the user's line that called elementgrad."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "elementgrad":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ElementgradWarning, stacklevel=level)


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
    """A batch does not consist of independent examples, as `batch=True` says."""


class OptionError(ElementgradError, ValueError):
    """An option of a call has a value that it cannot have."""


class SizeError(ElementgradError, MemoryError):
    """The result would be larger than the memory that is free."""


class WorkerError(ElementgradError, RuntimeError):
    """A worker was lost repeatedly, or with its whole pool, before its work was done."""


class PatchError(ElementgradError, ValueError):
    """A patch or its file is damaged, of another kind, or inconsistent."""


class PatternError(ElementgradError, ValueError):
    """A sparsity pattern misses entries that are not zero, or none can be found that holds everywhere."""


class UnconnectedError(ElementgradError, ValueError):
    """The framework's graph has no path between two tensors: there is no gradient, which is not a gradient of zero.

    >>> import torch, elementgrad as eg
    >>> eg.grad(lambda x: x.detach().sum(), torch.ones(2))
    Traceback (most recent call last):
    elementgrad.UnconnectedError: output does not depend on x ...
    """

    loss: Any = None
    """The loss without a gradient, where a training verb was given one."""
    leaf: Any = None
    """The elements without one; None if the loss has none at all."""

    def about(self, loss: Any, leaf: Any = None) -> "UnconnectedError":
        """Set what the error is about, and return it. `__init__` cannot take it: see `ElementgradError`."""
        self.loss, self.leaf = loss, leaf
        return self


class WatchError(ElementgradError, ArithmeticError):
    """A run that is watched came to a number that is not finite, or that a rule of the user's does not allow.

    Its fields say which element was the first, at which step, why, and where in the code.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     model.weight[0, 1] = float("inf")
    >>> try:
    ...     with eg.watch(model, capture=None):
    ...         model(torch.ones(1, 2))
    ... except eg.WatchError as error:
    ...     print(error.place, error.value, error.cause)
    weight[0, 1] inf bad-parameter
    """

    tripped: str = ""
    """The check that stopped the run, `output[0, 3] is nan`."""
    cause: str | None = None
    """`bad-input`, `bad-parameter`, `update`, `outside`, `rule`, `masked-row`, `unseen`, or a cause of `eg.explain`."""
    place: str | None = None
    """The earliest bad element, `a.weight[3, 7]`."""
    value: float | None = None
    where: str | None = None
    """The user's line, `model.py:42`."""
    module: str = ""
    operation: str | None = None
    clause: str | None = None
    """The clause that says what is wrong."""
    evidence: Any = ()
    fix: str | None = None
    step: int = 0
    """The number of optimizer steps before it in this block."""
    micro_batch: int = 0
    """The number of forwards before it in this step."""
    state: Any = None
    """The optimizer's state of the element, by name, if the update made the number."""
    capture: str | None = None
    """The file from which the step can be replayed."""
    rank: int | None = None
    """The process that has the element, if there are several."""
    in_gradient: bool = False
    """True if the number is a gradient of the element."""


# Users find these types in `elementgrad`, and messages and pickles name them so.
for _public in [value for value in vars().values() if isinstance(value, type) and value.__module__ == __name__]:
    _public.__module__ = "elementgrad"


def require_packages(packages: str, what: str, extra: str) -> None:
    """Raise an error that says what to install, unless all of these packages can be imported.

    >>> from elementgrad.errors import require_packages
    >>> require_packages("numpy no_such_package", "eg.plot", "show")
    Traceback (most recent call last):
    ImportError: eg.plot needs no_such_package; pip install 'elementgrad[show]'
    """
    for package in packages.split():
        try:
            import_module(package)
        except ImportError:
            raise ImportError(f"{what} needs {package}; pip install 'elementgrad[{extra}]'") from None
