"""The interface that a backend implements for `eg.watch`: `WatchBackend`, and the `Watcher` that it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elementgrad._explain.trace import Hint, Numbers, Op
from elementgrad._place.place import Place
from elementgrad.errors import OptionError

Tensor = Any
Rule = Callable[[Tensor], bool]


@dataclass(frozen=True)
class NamedValue:
    """A tensor of a recorded step that has a name."""

    name: str
    kind: str
    """`input`, `parameter`, `buffer` or `output`."""
    id: int | None
    """Its value id; None if no operation reads it."""
    tensor: Tensor


@dataclass(frozen=True)
class StepRecord:
    """One run of a forward, and of its loss if that is known, with every operation."""

    framework: str
    ops: Sequence[Op]
    connected: AbstractSet[int]
    numbers: Numbers
    held: Sequence[NamedValue]
    """Inputs first, then parameters, then buffers."""
    outputs: Sequence[NamedValue]
    loss: NamedValue | None = None
    cotangents: Mapping[int, Tensor] = field(default_factory=dict)
    """The gradient that arrived at each output, by its position."""
    names: Mapping[int, str] = field(default_factory=dict)
    """The modules whose results values are."""
    updates: AbstractSet[int] = frozenset()
    """The values that an optimizer's update makes, where that is part of the record."""
    hints: Sequence[Hint] = ()
    following: Callable[[], AbstractContextManager[Any]] = nullcontext
    remarks: Sequence[str] = ()
    """Parts of the step that could not be recorded, and why."""


class OutputRef:
    """Stands for an output of the model among the arguments of the loss."""

    def __init__(self, position: int):
        self.position = position


@dataclass(frozen=True)
class CapturedStep:
    """All that a forward and its backward run from. Tensors are the framework's own, and are written as they are."""

    model: Mapping[str, Any]
    """Names, shapes and dtypes of what the model holds: another model is refused by it."""
    arguments: Any
    """The arguments of the forward, as a tuple and a dict; and as a third item those of the loss, if they are known."""
    held: Mapping[str, Tensor]
    """Parameters and buffers as they were before the forward, by `parameter:` or `buffer:` and their name."""
    random: Mapping[str, Tensor] = field(default_factory=dict)
    """The random state before the forward, by its device."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """The gradient that arrived at each output, by its position."""
    results: Mapping[str, Tensor] = field(default_factory=dict)
    """The results, of which only hashes are written: `output:0`, `gradient:a.weight`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Modes and precision, in JSON."""
    omitted: Sequence[str] = ()
    """The parts that could not be kept, and why."""


@dataclass(frozen=True)
class ReplayedRun:
    """A captured step that ran again."""

    results: Mapping[str, Tensor]
    """As in `CapturedStep.results`."""
    record: Callable[[], StepRecord]
    """Runs it once more, under the recorder of `eg.explain`."""


@dataclass(frozen=True)
class Hit:
    """A check that failed, and how to find out more."""

    tripped: str
    step: int
    micro_batch: int = 0
    record: Callable[[], StepRecord] | None = None
    """Runs the forward again and returns the record, if there is anything to find in it."""
    captured: Callable[[], CapturedStep] | None = None
    cause: str | None = None
    """A cause that is known already; then the fields below say the rest."""
    place: str | None = None
    value: float | None = None
    where: str | None = None
    module: str = ""
    state: Mapping[str, float] = field(default_factory=dict)
    evidence: Sequence[str] = ()
    otherwise: "Hit | None" = None
    """The hit to report if the record shows nothing: the forward of another micro-batch, or an update."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of `eg.watch`, checked."""

    rules: Mapping[str, tuple[Place, Rule]]
    loss: Callable[..., Any] | None
    stop: Callable[[Hit], None]
    """Reports a hit, and raises the `WatchError`, unless the watch is gone."""
    captures: bool = True
    """False if no capture is to be written."""


class Watcher:
    """Watches one run. The defaults are those of a framework that has no such thing."""

    def start(self) -> None:
        """Begin; what is changed for it is registered with the innermost open scope."""

    def finish(self) -> None:
        """Look at what was not looked at yet, at the end of a block that raised nothing."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's step, where that is what is watched."""
        raise OptionError("a model is watched in a block, as in with eg.watch(model): ...; a step of JAX is called")

    def call_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss that was given, and note its arguments."""
        raise NotImplementedError

    def agree(self, report: dict[str, Any], decided: bool) -> tuple[dict[str, Any], bool]:
        """Agree with other processes on a report, as JSON; return it, and True in the one that writes the capture.

        `decided` is True if the fault was found in this process.
        """
        return report, True


class WatchBackend(ABC):
    """Watches runs of one framework, and runs captured steps again."""

    name: str

    @abstractmethod
    def watcher(self, model: Any, optimizer: Any, options: WatchOptions) -> Watcher:
        """Return a watcher, or raise an error if the model cannot be watched."""

    @abstractmethod
    def describe(self, model: Any) -> Mapping[str, Any]:
        """Return the names, shapes and dtypes of what a model holds."""

    @abstractmethod
    def to_bytes(self, x: Tensor) -> tuple[str, tuple[int, ...], np.ndarray, Mapping[str, Any]]:
        """Return the dtype, the shape, the bytes and further properties of a tensor; TypeError if it is none."""

    @abstractmethod
    def from_bytes(
        self, dtype: str, shape: tuple[int, ...], content: np.ndarray, properties: Mapping[str, Any]
    ) -> Tensor:
        """Return the tensor that `to_bytes` was given."""

    @abstractmethod
    def run(self, model: Any, captured: CapturedStep, loss: Callable[..., Any] | None) -> ReplayedRun:
        """Run a captured step again."""
