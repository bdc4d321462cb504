"""The interface that each framework implements for derivatives: a function evaluated once, ready for sweeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

if TYPE_CHECKING:
    from elementgrad._names.backend import Model
    from elementgrad._place.selection import Selection

Tensor = Any
Function = Callable[..., Sequence[Tensor]]
"""A function from the tensors that are differentiated to all tensors of the output."""
Projection = Callable[[np.ndarray], np.ndarray]
"""From the values of a derivative by an input to its products with all seeds of a batch of forward sweeps."""
PRECISION = {2: 2.0**-8, 4: 2.0**-23, 8: 2.0**-52}
"""By the bytes of a number; of the two formats of two bytes the coarser one."""


class TensorFunction(Protocol):
    """A call of the user's function, as a function of the tensors that are differentiated."""

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""

    @property
    def model(self) -> "Model":
        """The user's function, with the names that it holds."""

    @property
    def others(self) -> Sequence[Tensor]:
        """The tensors among the arguments that are not differentiated."""

    @property
    def held(self) -> Sequence[bool]:
        """For each differentiated tensor, True if the function holds it itself, as a model does its parameters."""

    @property
    def inside(self) -> bool:
        """True if it replaces, changes or returns tensors that are neither arguments nor outputs."""

    def __call__(self, *tensors: Any) -> Sequence[Tensor]:
        """Run the function and return the requested tensors.

        An activation has None for its differentiated tensor. Its argument here is a function of the activation, a
        tensor to add to it, or None to leave it as it is.
        """


@dataclass(frozen=True)
class Use:
    """One argument slot of one operation in the user's function."""

    operation: str
    where: str | None
    """File and line of the user's code, if they are known."""


class UnsupportedError(Exception):
    """The framework has no rule for a sweep in this direction through this function; the message says why."""


class NotBatchableError(Exception):
    """Sweeps in this direction cannot run as a batch, though maybe one by one; the message says why."""


class Linearization(ABC):
    """A function at its inputs. One evaluation serves all sweeps, where the framework allows it.

    Sweeps come in batches: `k` seeds for a tensor of shape `s` have shape `(k, *s)`. A batch of several may raise
    `NotBatchableError`; a batch of one is always tried, and raises `UnsupportedError` if the direction has no rule.
    Sweeps do not change a linearization. What they teach about it is kept by the `SweepRunner` that runs them.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    jvp_transposes_vjp = False
    """True if forward sweeps are transposed reverse ones by construction, so that they need no check."""
    missing_rules: Mapping[str, str] = MappingProxyType({})
    """Directions, "forward" or "reverse", that are known to have no rule, and why."""

    @abstractmethod
    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Run reverse sweeps from cotangents of an output; return a batch for each input, None without a path."""

    def vjp_of_element(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Tensor | None] | None:
        """Run one reverse sweep from one element, if that is cheaper than a seed for `vjp`; return None if it is not.

        The derivatives have the shapes of the inputs, without an axis for the sweep.
        """
        return None

    reads_blocks = False
    """True if `read_block` may need no sweep."""

    def read_block(
        self, output: int, rows: "Selection", inputs: Sequence[int], columns: "Sequence[Selection]"
    ) -> list[Tensor | None] | None:
        """Return the derivatives of all rows by all columns, if no sweep through whole tensors is needed for them.

        There is a matrix for each input, None without a path. None in place of the list leaves them to sweeps.
        """
        return None

    once = False
    """True if one element is read and then nothing else, so that the sweep may free what the evaluation holds."""
    narrows = False
    """True if `narrow` may find a shorter way."""

    def narrow(
        self, output: int, inputs: Sequence[int], positions: Sequence[np.ndarray | None]
    ) -> "Linearization | None":
        """Return the same function with some elements of these inputs in their place, if sweeps to them are shorter.

        It has reverse sweeps from `output`. The elements are given by their flat positions; None leaves an input whole.
        """
        return None

    def describe(self, output: int, rows: "Selection", names: Mapping[int, str]) -> str | None:
        """Return what `read_block` needs of each input, by its name; None if sweeps go through whole tensors."""
        return None

    def read_value(self, output: int, selection: "Selection") -> Tensor | None:
        """Return the values of some elements of an output that has not been evaluated; None if it has."""
        return None

    @abstractmethod
    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Run forward sweeps from tangents of an input; return a batch for each output, None without a path."""

    def transpose_vjp(self, input: int, output: int, seeds: Tensor, project: Projection) -> tuple[Tensor | None, bool]:
        """Run forward sweeps as transposes of a reverse one, and return True with them if they passed `TangentCheck`.

        Raises:
            UnsupportedError: `jvp` is all there is, or reverse sweeps turn out not to be linear.
        """
        raise UnsupportedError("reverse sweeps are not transposed")

    @abstractmethod
    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """Return the bytes of the largest intermediate derivative of one sweep, in a batch of `sweeps`."""

    @abstractmethod
    def gradient(self, output: int, seed: Tensor) -> "Linearization":
        """Return one reverse sweep as a function of the inputs, itself linearized, with an output for each input.

        An output without a path is zeros that depend on nothing.
        """

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        """Return which entries can be nonzero: a row per output element, a column per input element.

        It holds for every input of the same shape and dtype, or with `local` for this one, and misses no entry: an
        unknown operation counts as dense. None without a path. An `UnsupportedError` says why no pattern can be found,
        as in a function that branches on its values (with `local` it can).
        """
        raise FrameworkError("patterns are not found on this framework; give one, eg.jacobian(f, x, pattern=P)")

    def value(self, output: int) -> Tensor:
        """Return an output that the user may keep."""
        return self.outputs[output]


class TangentCheck:
    """Compares a batch of forward sweeps with reverse ones: `u @ (J @ v)` is `(u @ J) @ v`.

    A forward sweep goes by other rules, and may run the function again: it knows nothing of gradient hooks, of a state
    that the first run has changed, of a reverse rule that is no derivative or not linear. Or it transposes a reverse
    sweep, as if that were linear. Reverse sweeps from a generic seed and from its negative are enough to compare a
    batch of forward ones with: what is cut off on one side of zero, as by guided backpropagation, shows on the other.
    The seed is scaled so that no large row hides a small one.

    Args:
        tangents: the results of the forward sweeps, in numbers of at least four bytes.
        precision: the coarser one of the dtypes of both ends.
    """

    def __init__(self, tangents: np.ndarray, precision: float):
        self._precision = precision
        self._tangents = tangents.reshape(len(tangents), -1)
        self._memory = np.abs(self._tangents)  # used for all that follows, as new memory takes longer than sums
        largest = self._memory.max(0)
        if not np.isfinite(largest.max()):
            raise UnsupportedError("they are not finite, and then the two directions differ")
        largest[largest == 0] = 1
        self.seed = np.divide(_generic_weights(len(largest), largest.dtype), largest, out=largest)
        """The seed of the reverse sweeps, flattened."""

    def expect(self, seed: np.ndarray) -> None:
        """Compute the products of the forward sweeps with the seed, as it is in the dtype of the output."""
        # NumPy sums pairwise, so that errors stay far below the tolerance in single precision as well. A matrix library
        # has threads of its own, which would wait for those of the framework. The tolerance, for which the memory still
        # has absolute values, needs no such care; `einsum` stores no products.
        seed = seed.reshape(-1)
        self._tolerance = self._precision**0.5 * np.einsum("ij,j->i", self._memory, seed)
        self._expected = np.multiply(self._tangents, seed, out=self._memory).sum(-1)

    def compare(self, sign: int, products: np.ndarray) -> None:
        """Raise `UnsupportedError` unless a reverse sweep from `sign` times the seed has these products."""
        if not (np.abs(sign * self._expected - products) <= self._tolerance).all():
            raise UnsupportedError("they give other numbers than reverse sweeps, or not the same when run again")


@lru_cache(maxsize=8)
def _generic_weights(size: int, dtype: np.dtype) -> np.ndarray:
    """Return weights that cancel in no function but by chance; positive, as the seeds of rows are."""
    return np.random.default_rng(0).uniform(0.5, 1.5, size).astype(dtype)


def reason(error: BaseException) -> str:
    """Return the first sentence of a framework's error, short enough for one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= 160 else sentence[:157] + "..."
