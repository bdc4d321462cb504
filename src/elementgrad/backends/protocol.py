"""What a framework must supply. Everything that can be built from these operations is built above them, once."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from elementgrad.backends.limits import Limits
from elementgrad.backends.linear import Linear, Run, Use
from elementgrad.backends.matrices import Matrices
from elementgrad.backends.model import Model
from elementgrad.backends.recorder import Recorder
from elementgrad.backends.witness import Told, Witness
from elementgrad.errors import FrameworkError, TracedError

if TYPE_CHECKING:
    from elementgrad.backends.training import Trainer
    from elementgrad.selection import Selection

Tensor = Any
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

    def array(self, x: Tensor) -> np.ndarray | None:
        """Return the values as an array that can be written to, or None if they are traced.

        A dtype that NumPy lacks comes as float32, which holds it exactly.
        """
        native = self.dtype(x) in NATIVE
        values = self.read(x) if native else self.floats(x)
        if values is None:
            return None
        values = np.asarray(values if native else values.astype(np.float32))
        return values if values.flags.writeable else values.copy()

    @abstractmethod
    def limits(self, x: Tensor) -> Limits | None:
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
    def graft(self, value: Tensor, slope: Tensor) -> Tensor:
        """The value of the one with the derivatives of the other."""

    @abstractmethod
    def linearize(self, run: Run, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linear:
        """Evaluate a function at its inputs, ready for sweeps through derivatives up to an order."""

    def uses(self, run: Run, inputs: Sequence[Tensor], input: int) -> tuple[Linear, list[Use]]:
        """Evaluate a function as one of all the uses that it makes of one of its inputs, each an input of its own."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def itemsize(self, x: Tensor) -> int:
        """The bytes of one element."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros in the dtype of `like`, where `like` lives."""

    @abstractmethod
    def units(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        """A stack of seeds for a tensor, one per position: ones there in each of `batch` examples, zeros elsewhere."""

    @abstractmethod
    def floats(self, x: Tensor) -> np.ndarray | None:
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

    def sample(self, run: Run, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Run a function at other numbers, as it would run if its first tensor were differentiated."""
        with self.undisturbed(run.function):
            return run(*tensors)

    def swift(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function that is to be called many times, compiled where that makes it faster."""
        return function

    @abstractmethod
    def witness(self, run: Run, source: Tensor | None, probe: bool) -> Witness:
        """Run a function from one tensor to another, and tell how. None for a source that the run meets.

        With `probe`, another run with the source moved may tell what no operation shows.
        """

    def told(self, of: Picked, wrt: Picked) -> Told:
        """What is to be seen of two live tensors, of which some elements may be meant."""
        raise FrameworkError(
            f"live tensors of {self.name} do not say where they come from; give the function and its arguments, as in "
            "eg.explain(f, x)"
        )

    def step(self, function: Callable[[], Any], wrt: Tensor | None) -> Told:
        """Run a training step of the user's as it is, and tell why it raised, or what a tensor's gradient is."""
        raise FrameworkError(f"a step of {self.name} cannot be watched; give the loss as a function, eg.explain(f, x)")

    def slopes(
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

    def largest(
        self, x: Tensor, count: int, floor: float, minus: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Size, as float64, and position in the flattened tensor of the elements of `x - minus` largest in size.

        They are at most so many and none below the floor; of equal ones those that come first. Where an element is not
        finite it is given alone.
        """
        raise FrameworkError(f"elements of {self.name} cannot be ranked yet; rank those of a torch.nn.Module")

    def free(self, like: Tensor) -> int | None:
        """The bytes free on the device of a tensor, if it has memory of its own."""
        return None

    def __reduce__(self) -> str:
        return "backend"  # the one of its module: a copied or pickled place finds it again

    def number(self, value: Any) -> Kind | None:
        """What kind of number this is, if it is one of the framework's own stand-ins for a Python number."""
        return None

    def remembers(self, kind: type) -> bool:
        """Whether a type of its own may be looked up by identity from now on."""
        return True

    def fresh(self, x: Tensor) -> Tensor:
        """A tensor that may be written to without changing another; a framework without writes has no others."""
        return x

    def materialize(self, x: Tensor) -> Tensor:
        """Return a result as an ordinary tensor that holds every number itself, and no others; x if it is one."""
        return x

    def kept(self, x: Tensor) -> Tensor:
        """A tensor as it is now, whatever is written to it later, and of the same derivatives."""
        return self.fresh(x)

    def only(self, x: Tensor, selection: "Selection") -> Tensor:
        """x, with derivatives for the selected elements alone."""
        if selection.mask is not None:
            return self.where(selection.mask.values, x, self.stop(x))
        return self.put(self.stop(x), selection, self.take(x, selection))

    def all_but(self, x: Tensor, selection: "Selection") -> Tensor:
        """x, with derivatives for all but the selected elements."""
        if selection.mask is not None:
            return self.where(selection.mask.values, self.stop(x), x)
        return self.put(x, selection, self.stop(self.take(x, selection)))

    def refuse(self, traced: Tensor, why: str) -> NoReturn:
        """Raise `TracedError`, or what makes a compiler go on without compiling: these values must be read."""
        raise TracedError(why)

    def compiling(self) -> bool:
        """Whether a compiler is interpreting Python code right now, so that no Python value can be relied on."""
        return False

    def compiles(self) -> bool:
        """Whether a compiler interprets Python code right now, or would if it were called from here."""
        return self.compiling()

    def uncompiled(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that no such compiler may look into."""
        return function(*arguments, **options)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the user's as it would run if they called it here, where code may be rewritten or copied."""
        return function

    def opened(self, value: Any) -> tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        """The keys and contents of a container of the framework's own, and a function that puts others in."""
        return None

    def models(self, function: Any) -> bool:
        """Whether a function holds tensors and layers that this framework can name."""
        return False

    def model(self, function: Callable[..., Any]) -> Model:
        """A function, with the names that it holds."""
        return Model(function)

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a model, the function whose parameters its arguments are."""
        return function

    def trainer(self, model: Any) -> "Trainer":
        """How elements of a model train."""
        raise FrameworkError(f"elements of a {self.name} model cannot train; give a torch.nn.Module or a Keras model")

    def bare(self, x: Tensor) -> Tensor:
        """The tensor that a model holds, for one that stands for it in the user's hands."""
        return x

    def passes(self, x: Tensor) -> bool:
        """Whether a value that bears a name is computed here, and not just traced to find out its shape."""
        return True

    def single(self, x: Tensor) -> bool:
        """Whether a value that bears a name is one value, and not one for each time that a loop comes by."""
        return True

    def undisturbed(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Run a function of the user's in here, and nothing that it changes stays changed."""
        return nullcontext()

    def surroundings(self, linear: Linear) -> Any:
        """What an evaluation ran from beside its arguments, such as random numbers, as something to pickle."""
        return None

    def within(self, surroundings: Any) -> AbstractContextManager[Any]:
        """Run from the same surroundings, here or in another process."""
        return nullcontext()

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """How to pickle what the framework makes of functions, where it cannot be pickled itself."""
        return {}

    def staged(self, x: Tensor, name: str) -> Tensor:
        """A tensor that is being traced, with a name that stays in the program; any other as it is."""
        return x
