"""A function evaluated once, ready for sweeps through its derivative: what each framework supplies for reading."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Tensor = Any
Function = Callable[..., Sequence[Tensor]]
"""Takes the tensors that are differentiated, gives all tensors of the output."""


class TensorFunction(Protocol):
    """A call of the user's function, as a function of the tensors that are differentiated."""

    @property
    def function(self) -> Callable[..., Any]:
        """What the user wrote."""

    @property
    def others(self) -> Sequence[Tensor]:
        """The tensors among its arguments that stay as they are."""

    @property
    def held(self) -> Sequence[bool]:
        """Which of the tensors that are differentiated the function holds itself, as a model does its parameters."""

    @property
    def inside(self) -> bool:
        """Whether it replaces, changes or gives tensors that are neither arguments nor outputs."""

    def __call__(self, *tensors: Any) -> Sequence[Tensor]:
        """The tensors that are asked for.

        A tensor that is None at first is one that the function computes on its way. What is given for it is a function
        of it, a tensor to add to it, or None to leave it as it is.
        """


@dataclass(frozen=True)
class Use:
    """One argument slot of one operation in the user's function."""

    operation: str
    where: str | None
    """File and line of the user's code, if they are known."""


class UnsupportedError(Exception):
    """This framework has no rule for a sweep in this direction through this function; the message says why."""


class NotBatchableError(Exception):
    """Sweeps in this direction cannot run as a stack, though maybe one by one; the message says why."""


class Linearization(ABC):
    """A function at its inputs. One evaluation serves all sweeps, where the framework allows it.

    Sweeps come in stacks: `k` seeds for a tensor of shape `s` have shape `(k, *s)`. A stack of several may raise
    `UnstackableError`; a stack of one is always tried, and raises `UnsupportedError` where the direction cannot be had.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    mirrored = False
    """Whether forward sweeps are the transposes of reverse ones by construction, so that nobody need check."""
    traces = False
    """Whether a stack is traced before it runs, which takes longer than a few sweeps one by one."""

    def __init__(self) -> None:
        self.looped: dict[int, dict[str, str]] = defaultdict(dict)
        """For each output, the directions whose sweeps run one after another instead of as one stack, and why."""
        self.without: dict[int, dict[str, str]] = defaultdict(dict)
        """For each output, the directions found to have no rule, and why."""
        self.apart: set[tuple[int, ...]] = set()
        """An output and inputs, where their examples are known not to mix."""

    @abstractmethod
    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Reverse sweeps: seeds for an output to derivatives for each input, None for one without a path."""

    def row(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Tensor | None] | None:
        """One reverse sweep from one element, where that takes less than a seed for `pull`; None where it does not."""
        return None

    @abstractmethod
    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Forward sweeps: seeds for an input to derivatives of each output, None for one without a path."""

    @abstractmethod
    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """The bytes of the largest derivative that each of so many sweeps makes on its way."""

    @abstractmethod
    def gradient(self, output: int, seed: Tensor) -> "Linearization":
        """One reverse sweep as a function of the inputs, itself ready for sweeps: it has an output for each of them.

        An output without a path is zeros that depend on nothing.
        """

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        """Which entries can be nonzero: a row for each element of the output, a column for each of the input.

        It holds for every input of the same shape and dtype, or with `local` for this one, and misses no entry: what is
        not known is taken to depend on all. None without a path. `sparsity.reach` says how one is found. An
        `UnsupportedError` says why none can be, as where the function branches on its values (with `local` it can).
        """
        raise FrameworkError("patterns are not found on this framework; give one, eg.jacobian(f, x, pattern=P)")

    def value(self, output: int) -> Tensor:
        """An output, to be handed out."""
        return self.outputs[output]


def reason(error: BaseException) -> str:
    """The first sentence of a framework's error, short enough for one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= 160 else sentence[:157] + "..."
