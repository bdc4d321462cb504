"""The interface of a framework: `Backend`.

It is the operations on tensors that everything else is built from, `linearize`, and what the framework's compiler needs
to know. What only one verb needs is an interface of that verb, in its folder's `backend.py`: those of edits and names
come with the backend, as `backend.edit` and `backend.names`; the others are imported by `backend.load(verb)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np

from elementgrad._backends.autodiff import Linearization, TensorFunction
from elementgrad.errors import TracedError

if TYPE_CHECKING:
    from elementgrad._audit.backend import AuditBackend
    from elementgrad._cone.backend import ConeBackend
    from elementgrad._explain.backend import ExplainBackend
    from elementgrad._names.backend import NamesBackend
    from elementgrad._place.edit import EditBackend
    from elementgrad._place.selection import Selection
    from elementgrad._read.backend import ReadBackend
    from elementgrad._train.top_backend import TopBackend
    from elementgrad._train.trainer import TrainBackend
    from elementgrad._watch.backend import WatchBackend

Tensor = Any
Kind = Literal["b", "i", "f", "c", "o"]
"""What a dtype holds: booleans, integers, floats, complex numbers or something else."""
NATIVE = ("float16", "float32", "float64", "complex64", "complex128")
"""The dtypes of derivatives that NumPy has."""
MODULES = {
    "read": "read",
    "explain": "explain",
    "train": "train.trainer",
    "top": "top",
    "cone": "cone.program",
    "audit": "audit",
    "watch": "watch",
}
"""The module of each backend in which `implementation` implements the interface of a verb."""


class DtypeRange(NamedTuple):
    """The range of a dtype; for complex numbers, the range of their parts.

    >>> from elementgrad._backends.base import DtypeRange
    >>> import numpy as np
    >>> limits = DtypeRange.from_floats(np.finfo(np.float16))
    >>> limits.high, limits.holds(65519), limits.holds(65520)
    (65504.0, True, False)
    """

    low: Any
    high: Any
    below: Any
    """The highest number that is too low. Of floats it is not next to `low`: those in between round to `low`."""
    above: Any
    """The lowest number that is too high."""

    @classmethod
    def from_integers(cls, info: Any) -> "DtypeRange":
        """Return the range that an `iinfo` describes."""
        low, high = int(info.min), int(info.max)
        return cls(low, high, low - 1, high + 1)

    @classmethod
    def from_floats(cls, info: Any) -> "DtypeRange":
        """Return the range that a `finfo` describes, whichever library it is of."""
        high = float(info.max)
        # The first number that rounds to infinity is half a step beyond the largest. It is computed as an int, since
        # float64 cannot hold it.
        half = math.ldexp(float(info.eps), math.frexp(high)[1] - 2)
        above = int(high) + int(half) if half >= 1 else high + half
        return cls(-high, high, -above, above)

    def holds(self, number: Any) -> bool:
        """Return True if a finite number fits, rounded if need be."""
        return bool(self.below < number < self.above)

    def contains(self, other: "DtypeRange") -> bool:
        """Return True if all numbers of another dtype fit, so that none has to be looked at."""
        return self.holds(other.low) and self.holds(other.high)


class Backend(ABC):
    """One framework."""

    name: str
    records_programs = False
    """True if functions can be recorded for cones."""
    conjugates = False
    """True if reverse sweeps of complex numbers take and give the conjugates of those of the other frameworks, which
    have `∂f/∂a + i ∂f/∂b` for a real f and `z = a + ib`."""

    def __init__(self, edit: "EditBackend", names: "NamesBackend"):
        self.edit = edit
        self.names = names
        self._loaded: dict[str, Any] = {}

    @overload
    def load(self, verb: Literal["read"]) -> "ReadBackend": ...
    @overload
    def load(self, verb: Literal["explain"]) -> "ExplainBackend": ...
    @overload
    def load(self, verb: Literal["train"]) -> "TrainBackend": ...
    @overload
    def load(self, verb: Literal["top"]) -> "TopBackend": ...
    @overload
    def load(self, verb: Literal["cone"]) -> "ConeBackend": ...
    @overload
    def load(self, verb: Literal["audit"]) -> "AuditBackend": ...
    @overload
    def load(self, verb: Literal["watch"]) -> "WatchBackend": ...
    def load(self, verb: str) -> Any:
        """Return the framework's implementation of a verb's interface, imported when it is first needed."""
        loaded = self._loaded.get(verb)
        if loaded is None:
            module = import_module(f"elementgrad._backends.{self.name}.{MODULES[verb]}")
            loaded = self._loaded[verb] = module.implementation
        return loaded

    def __reduce__(self) -> str:
        return "backend"  # the one of its module: a copied or pickled place finds it again

    # Types and dtypes

    @abstractmethod
    def owns(self, kind: type) -> bool:
        """Return True if a type is a tensor of the framework."""

    def caches_type(self, kind: type) -> bool:
        """Return True if a type that the framework owns may be looked up by identity from now on."""
        return True

    @abstractmethod
    def shape(self, x: Tensor) -> tuple[Any, ...]:
        """Return the shape; an axis whose size is not known while tracing is None."""

    @abstractmethod
    def kind(self, x: Tensor) -> Kind:
        """Return the kind of the dtype."""

    def dtype(self, x: Tensor) -> str:
        """Return the name of the dtype."""
        return str(x.dtype.name)

    @abstractmethod
    def itemsize(self, x: Tensor) -> int:
        """Return the bytes of one element."""

    @abstractmethod
    def dtype_range(self, x: Tensor) -> DtypeRange | None:
        """Return the range of the dtype, or None if the framework does not know it."""

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        """Enable computations in a dtype, for a framework that needs a switch for it; None for the tensors' own."""
        return nullcontext()

    # Values

    @abstractmethod
    def read(self, x: Tensor) -> np.ndarray | None:
        """Return the values, or None if they are traced."""

    @abstractmethod
    def to_float64(self, x: Tensor) -> np.ndarray | None:
        """Return the values as float64, or None if they are traced."""

    def to_numpy(self, x: Tensor) -> np.ndarray | None:
        """Return the values as an array that can be written to, or None if they are traced.

        A dtype that NumPy lacks comes as float32, which holds it exactly.
        """
        native = self.dtype(x) in NATIVE
        values = self.read(x) if native else self.to_float64(x)
        if values is None:
            return None
        values = np.asarray(values if native else values.astype(np.float32))
        return values if values.flags.writeable else values.copy()

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a copy of a NumPy array as a tensor."""

    @abstractmethod
    def cast(self, value: Any, like: Tensor) -> Tensor:
        """Return a number, array or tensor as a tensor with the dtype of `like`, on its device."""

    @abstractmethod
    def convert(self, x: Tensor, dtype: str) -> Tensor:
        """Return x in another floating dtype, such as float64."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return zeros with the dtype of `like`, on its device."""

    def copy(self, x: Tensor) -> Tensor:
        """Return a tensor that may be written to without changing x; x itself where tensors are never written to."""
        return x

    # Elements and structure

    @abstractmethod
    def take(self, x: Tensor, selection: "Selection") -> Tensor:
        """Return the selected elements, `x[index]`."""

    @abstractmethod
    def put(self, x: Tensor, selection: "Selection", value: Any) -> Tensor:
        """Return a copy of x with the selected elements replaced by a number or a broadcastable tensor of x's dtype."""

    @abstractmethod
    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        """Return x where the mask is true and y elsewhere, without arithmetic."""

    @abstractmethod
    def stop(self, x: Tensor) -> Tensor:
        """Return the same values, cut off from gradients."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return x in another shape of the same size."""

    @abstractmethod
    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return x repeated to a larger shape."""

    @abstractmethod
    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors joined along their first axis."""

    # Functions of the user

    @abstractmethod
    def linearize(self, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linearization:
        """Evaluate a function at its inputs, ready for sweeps through derivatives up to an order."""

    def isolated(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Undo at the end of the context what running the user's function in it changes, such as random states."""
        return nullcontext()

    # Compilers of Python code

    def require_concrete(self, traced: Tensor, why: str) -> NoReturn:
        """Raise `TracedError`, or what makes a compiler go on uncompiled: the values of `traced` must be read."""
        raise TracedError(why)

    def is_compiling(self) -> bool:
        """Return True while a compiler interprets Python code, so that no Python value can be relied on."""
        return False

    def compiles_here(self) -> bool:
        """Return True if a compiler interprets Python code now, or would if it were called from here."""
        return self.is_compiling()

    def call_uncompiled(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that no such compiler may look into."""
        return function(*args, **kwargs)
