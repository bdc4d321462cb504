"""The numbers that a dtype holds.

What a framework supplies for sparse matrices.

What a framework must supply. Everything that can be built from these operations is built above them, once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from elementgrad._backends.autodiff import Linearization, TensorFunction, Use
from elementgrad._backends.model import Model
from elementgrad._explain.trace import LiveReport, Trace
from elementgrad._read.recorder import Recorder
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError, TracedError

if TYPE_CHECKING:
    from elementgrad._place.selection import Selection
    from elementgrad._train.trainer import Trainer


class DtypeRange(NamedTuple):
    """The range of a dtype; of complex numbers, the range of their parts.

    >>> from elementgrad._backends.base import DtypeRange
    >>> import numpy as np
    >>> limits = DtypeRange.of_floats(np.finfo(np.float16))
    >>> limits.high, limits.hold(65519), limits.hold(65520)
    (65504.0, True, False)
    """

    low: Any
    high: Any
    below: Any
    """This number and all less do not fit. A float that rounds to the lowest does, so `low` itself does not tell."""
    above: Any

    @classmethod
    def of_integers(cls, info: Any) -> "DtypeRange":
        """Return the range that an `iinfo` describes."""
        low, high = int(info.min), int(info.max)
        return cls(low, high, low - 1, high + 1)

    @classmethod
    def of_floats(cls, info: Any) -> "DtypeRange":
        """Return the range that a `finfo` describes, whichever library it is of."""
        high = float(info.max)
        # Half a step beyond the largest number is the first that rounds to infinity. The sum is exact as an int, which
        # it has to be: of float64 it is no float.
        half = math.ldexp(float(info.eps), math.frexp(high)[1] - 2)
        above = int(high) + int(half) if half >= 1 else high + half
        return cls(-high, high, -above, above)

    def hold(self, number: Any) -> bool:
        """Return whether a finite number fits, rounded if need be."""
        return bool(self.below < number < self.above)

    def contain(self, other: "DtypeRange") -> bool:
        """Return whether all numbers of another dtype fit, so that none has to be looked at."""
        return self.hold(other.low) and self.hold(other.high)


Tensor = Any
Read = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
Layout = Literal["csr", "coo"]


class Matrices(ABC):
    """The part of a backend that makes sparse matrices of what sweeps give.

    What a framework knows of patterns is `Linear.pattern`.
    """

    name: str

    @abstractmethod
    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        """Positions in a vector that lives where `like` does, ready for `gather` any number of times."""

    @abstractmethod
    def gather(self, x: Tensor, index: Any) -> Tensor:
        """The elements of a vector at positions that `index` made ready."""

    @abstractmethod
    def seeds(self, numbers: np.ndarray, like: Tensor) -> Tensor:
        """Numbers in the dtype of `like`, ready any number of times; not a part of a program that is being traced."""

    def maybe_compile_read(self, read: Read) -> Read:
        """A function that is called many times, compiled where that is faster and as it stands where it cannot be."""
        return read

    @abstractmethod
    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """From values, one number for each entry by rows, to the framework's own sparse matrix.

        It is in the layout that the framework likes best unless told; the indices are made ready once, where `like`
        lives.
        """


Picked = tuple[Tensor, np.ndarray | None]
"""A live tensor, and the flat positions of some of its elements; None for all."""
Kind = Literal["b", "i", "f", "c", "o"]
"""What a dtype holds: booleans, integers, floats, complex numbers or something else."""
NATIVE = ("float16", "float32", "float64", "complex64", "complex128")
"""The dtypes of derivatives that NumPy has."""


class Backend(Matrices):
    """One framework."""

    conjugates = False
    """Whether a reverse sweep of complex numbers takes and gives the conjugates of what is said of real functions:
    `∂f/∂a + i ∂f/∂b` for `z = a + ib`."""

    @abstractmethod
    def owns(self, kind: type) -> bool:
        """Whether this type is a tensor of the framework."""

    @abstractmethod
    def shape(self, x: Tensor) -> tuple[Any, ...]:
        """The shape; an axis whose size is not known while tracing is None."""

    @abstractmethod
    def kind(self, x: Tensor) -> Kind:
        """What the dtype holds."""

    def dtype(self, x: Tensor) -> str:
        """The name of the dtype."""
        return str(x.dtype.name)

    @abstractmethod
    def read(self, x: Tensor) -> np.ndarray | None:
        """The values, or None if they are traced and nobody can know them."""

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
    def dtype_range(self, x: Tensor) -> DtypeRange | None:
        """Return the range of the dtype, or None if the framework does not tell it."""

    @abstractmethod
    def cast(self, value: Any, like: Tensor) -> Tensor:
        """A number, array or tensor as a tensor with the dtype of `like`, where `like` lives."""

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Tensor:
        """A NumPy array as a tensor of its own."""

    @abstractmethod
    def take(self, x: Tensor, selection: "Selection") -> Tensor:
        """The selected elements, `x[index]`."""

    @abstractmethod
    def put(self, x: Tensor, selection: "Selection", value: Any) -> Tensor:
        """A copy of x with the selected elements replaced by a number, or by a tensor of x's dtype that broadcasts."""

    @abstractmethod
    def accumulate(self, x: Tensor, selection: "Selection", value: Any, multiply: bool) -> Tensor:
        """A copy of x with values added or multiplied at traced indices, which may repeat."""

    @abstractmethod
    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        """x where the mask is true and y elsewhere, without arithmetic."""

    @abstractmethod
    def stop(self, x: Tensor) -> Tensor:
        """The same values, cut off from gradients."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x in another shape of the same size."""

    @abstractmethod
    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x repeated to a larger shape."""

    @abstractmethod
    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """The mean of x along an axis, weighted by the softmax of the logits, in x's dtype."""

    @abstractmethod
    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """The elements of x along an axis where the logits are largest."""

    @abstractmethod
    def straight_through(self, value: Tensor, slope: Tensor) -> Tensor:
        """The value of the one with the derivatives of the other."""

    @abstractmethod
    def linearize(self, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linearization:
        """Evaluate a function at its inputs, ready for sweeps through derivatives up to an order."""

    def uses(self, run: TensorFunction, inputs: Sequence[Tensor], input: int) -> tuple[Linearization, list[Use]]:
        """Evaluate a function as one of all the uses that it makes of one of its inputs, each an input of its own."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def itemsize(self, x: Tensor) -> int:
        """The bytes of one element."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros in the dtype of `like`, where `like` lives."""

    @abstractmethod
    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        """A stack of seeds for a tensor, one per position: ones there in each of `batch` examples, zeros elsewhere."""

    @abstractmethod
    def to_float64(self, x: Tensor) -> np.ndarray | None:
        """The values as float64, or None if they are traced and nobody can know them."""

    @abstractmethod
    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Stacks joined along their first axis."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """x with its axes in another order."""

    @abstractmethod
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of two matrices."""

    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        """Who records eager code that computes with these tensors."""
        raise FrameworkError(
            f"eager code of {self.name} cannot be recorded, since it leaves no trace; put it into a function f and use "
            "eg.jacobian(f, x) or eg.grad(f, x)"
        )

    def convert(self, x: Tensor, dtype: str) -> Tensor:
        """x in another floating dtype, such as float64."""
        raise NotImplementedError(self.name)

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        """Where numbers of a dtype can be computed with, for a framework that has to be told; None for its own."""
        return nullcontext()

    def run_at(self, run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Run a function at other numbers, as it would run if its first tensor were differentiated."""
        with self.isolated(run.function):
            return run(*tensors)

    def maybe_compile(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function that is to be called many times, compiled where that makes it faster."""
        return function

    @abstractmethod
    def trace(self, run: TensorFunction, source: Tensor | None, probe: bool) -> Trace:
        """Run a function from one tensor to another, and tell how. None for a source that the run meets.

        With `probe`, another run with the source moved may tell what no operation shows.
        """

    def report_live(self, of: Picked, wrt: Picked) -> LiveReport:
        """What is to be seen of two live tensors, of which some elements may be meant."""
        raise FrameworkError(
            f"live tensors of {self.name} do not say where they come from; give the function and its arguments, as in "
            "eg.explain(f, x)"
        )

    def report_step(self, function: Callable[[], Any], wrt: Tensor | None) -> LiveReport:
        """Run a training step of the user's as it is, and tell why it raised, or what a tensor's gradient is."""
        raise FrameworkError(f"a step of {self.name} cannot be watched; give the loss as a function, eg.explain(f, x)")

    def parameter_gradients(
        self,
        model: Model,
        parameters: Mapping[str, Tensor],
        losses: Callable[..., Iterable[Tensor]],
        squared: bool,
        give: Callable[[str, Tensor], None],
    ) -> None:
        """Give the derivative of the sum of the losses for each parameter, one at a time, and keep none.

        With `squared`, the sum of the squares of the derivatives of each number among the losses, as far as its order
        counts. A parameter that no loss reaches is not given. `losses()` runs the model, and
        `losses(other)` another in its place, where parameters are never written to.
        """
        raise FrameworkError(f"models of {self.name} cannot be ranked by a loss yet; rank a torch.nn.Module")

    def topk_abs(
        self, x: Tensor, count: int, floor: float, minus: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Size, as float64, and position in the flattened tensor of the elements of `x - minus` largest in size.

        They are at most so many and none below the floor; of equal ones those that come first. Where an element is not
        finite it is given alone.
        """
        raise FrameworkError(f"elements of {self.name} cannot be ranked yet; rank those of a torch.nn.Module")

    def free_memory(self, like: Tensor) -> int | None:
        """The bytes free on the device of a tensor, if it has memory of its own."""
        return None

    def __reduce__(self) -> str:
        return "backend"  # the one of its module: a copied or pickled place finds it again

    def number_kind(self, value: Any) -> Kind | None:
        """What kind of number this is, if it is one of the framework's own stand-ins for a Python number."""
        return None

    def caches_type(self, kind: type) -> bool:
        """Whether a type of its own may be looked up by identity from now on."""
        return True

    def copy(self, x: Tensor) -> Tensor:
        """A tensor that may be written to without changing another; a framework without writes has no others."""
        return x

    def materialize(self, x: Tensor) -> Tensor:
        """Return a result as an ordinary tensor that holds every number itself, and no others; x if it is one."""
        return x

    def snapshot(self, x: Tensor) -> Tensor:
        """A tensor as it is now, whatever is written to it later, and of the same derivatives."""
        return self.copy(x)

    def only(self, x: Tensor, selection: "Selection") -> Tensor:
        """x, with derivatives for the selected elements alone."""
        if selection.mask is not None:
            return self.where(selection.mask.values, x, self.stop(x))
        return self.put(self.stop(x), selection, self.take(x, selection))

    def stop_gradient_at(self, x: Tensor, selection: "Selection") -> Tensor:
        """x, with derivatives for all but the selected elements."""
        if selection.mask is not None:
            return self.where(selection.mask.values, self.stop(x), x)
        return self.put(x, selection, self.stop(self.take(x, selection)))

    def require_concrete(self, traced: Tensor, why: str) -> NoReturn:
        """Raise `TracedError`, or what makes a compiler go on without compiling: these values must be read."""
        raise TracedError(why)

    def is_compiling(self) -> bool:
        """Whether a compiler is interpreting Python code right now, so that no Python value can be relied on."""
        return False

    def compiles_here(self) -> bool:
        """Whether a compiler interprets Python code right now, or would if it were called from here."""
        return self.is_compiling()

    def call_uncompiled(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that no such compiler may look into."""
        return function(*arguments, **options)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the user's as it would run if they called it here, where code may be rewritten or copied."""
        return function

    def flatten_node(self, value: Any) -> tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        """The keys and contents of a container of the framework's own, and a function that puts others in."""
        return None

    def is_model(self, function: Any) -> bool:
        """Whether a function holds tensors and layers that this framework can name."""
        return False

    def model(self, function: Callable[..., Any]) -> Model:
        """A function, with the names that it holds."""
        return Model(function)

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a model, the function whose parameters its arguments are."""
        return function

    def trainer(self, model: Any) -> "Trainer":
        """How elements of a model train."""
        raise FrameworkError(f"elements of a {self.name} model cannot train; give a torch.nn.Module or a Keras model")

    def unwrap_parameter(self, x: Tensor) -> Tensor:
        """The tensor that a model holds, for one that stands for it in the user's hands."""
        return x

    def is_real_call(self, x: Tensor) -> bool:
        """Whether a value that bears a name is computed here, and not just traced to find out its shape."""
        return True

    def is_single_value(self, x: Tensor) -> bool:
        """Whether a value that bears a name is one value, and not one for each time that a loop comes by."""
        return True

    def isolated(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Run a function of the user's in here, and nothing that it changes stays changed."""
        return nullcontext()

    def ambient_state(self, linear: Linearization) -> Any:
        """What an evaluation ran from beside its arguments, such as random numbers, as something to pickle."""
        return None

    def restore_ambient_state(self, surroundings: Any) -> AbstractContextManager[Any]:
        """Run from the same surroundings, here or in another process."""
        return nullcontext()

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """How to pickle what the framework makes of functions, where it cannot be pickled itself."""
        return {}

    def name_in_graph(self, x: Tensor, name: str) -> Tensor:
        """A tensor that is being traced, with a name that stays in the program; any other as it is."""
        return x
