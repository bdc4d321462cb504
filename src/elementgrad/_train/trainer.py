"""What a framework does for elements of a model that train, and for the files they are kept in."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from elementgrad._place.grammar import listed, nearest
from elementgrad.errors import FrameworkError, PatchError, PlaceError

Tensor = Any


def digest(elements: Iterable[tuple[Any, ...]]) -> bytes:
    """What processes compare to know whether they mean the same elements, each a name and its arrays of numbers."""
    told = hashlib.sha256()
    for name, *numbers in elements:
        told.update(repr((name, [each.shape for each in numbers])).encode())
        for each in numbers:
            told.update(each.tobytes())
    return told.digest()


def unlike(elements: Sequence[tuple[Any, ...]]) -> FrameworkError:
    """The error about elements of this process that are not those of the others."""
    names = listed(list(dict.fromkeys(name for name, *_ in elements)))
    return FrameworkError(
        f"this process has {sum(len(numbers[0]) for _, *numbers in elements)} elements in {names}, and another that "
        "trains the model has others, or other values for them; name the same ones in each, in the same order"
    )


class ElementGroup:
    """The elements of one place: each framework has a subclass of its own."""

    tensor: Tensor
    """The parameter they are in."""
    positions: np.ndarray
    """Where they are in it, flat."""
    leaf: Tensor
    """Their values, in one row: what an optimizer moves."""
    originals: Tensor
    """What they were, in the parameter's dtype."""
    found: Tensor
    """What they were when this was made, which may be what they had become by an earlier training."""
    mark: Any
    """Where their change is noted, with `bits` of the originals: to be told if these change."""


class TrainingState(NamedTuple):
    """Whether a parameter trains as a whole."""

    trained: bool
    """Whether it did before any elements of the model."""
    claimed: bool = False
    """Whether elements that train have frozen it, or have spared it."""
    kept: bool = False
    """Whether they were told to spare it."""
    able: bool = True
    """Whether its dtype can train at all."""


class Trainer(ABC):
    """One model whose elements train."""

    elsewhere: Mapping[str, str] = {}
    """Words of `Elements` that belong to other frameworks, and what to write here instead."""
    kind = "parameter"
    """What the framework calls a tensor that trains."""
    others: Mapping[str, str] = {}
    """What else bears a name, by its kind, in words."""
    separator = "."
    """What stands between the parts of a name."""
    freezes = True
    """Whether parameters hold still while elements train."""

    @abstractmethod
    def parameter(self, name: str) -> Tensor:
        """The parameter that bears a name; anything else is an error that says what fits."""

    @abstractmethod
    def named(self, tensor: Tensor) -> str:
        """The name of a parameter, given itself; another tensor is an error."""

    def only_parameter(self) -> str:
        """The name of the only parameter of a model that has one."""
        names = list(self.names())
        if len(names) != 1:
            raise PlaceError(f"there are {len(names)} {self.kind}s; name one: {listed(names)}")
        return names[0]

    def unknown_name_error(self, name: str, kind: str | None) -> PlaceError:
        """The error about a name that no parameter bears, but maybe something of another kind."""
        names = list(self.names())
        if kind is None:
            return PlaceError(f"no {self.kind} named {name!r}; {nearest(name, names)}")
        inside = [other for other in names if other.startswith(name + self.separator)]
        hint = f"it has {listed(inside)}" if inside else nearest(name, names)
        return PlaceError(f"{name!r} is {self.others[kind]} and only {self.kind}s train; {hint}")

    def not_a_parameter_error(self, tensor: Tensor) -> PlaceError:
        """The error about a tensor that is none of the parameters."""
        names = listed(list(self.names()))
        return PlaceError(f"a tensor of shape {tuple(tensor.shape)} is no {self.kind} here; there are: {names}")

    @abstractmethod
    def training(self, tensor: Tensor) -> Sequence[ElementGroup]:
        """Which parts of a parameter train now."""

    @abstractmethod
    def check(self, tensor: Tensor, name: str) -> None:
        """Refuse a parameter whose elements cannot train."""

    @property
    def is_distributed(self) -> bool:
        """Whether the parameters are shared by several processes, which make the same calls."""
        return False

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the one of several that writes for all."""
        raise NotImplementedError

    def gathered(self, row: np.ndarray) -> np.ndarray:
        """A row of int32 from each of several processes, all of which must ask."""
        raise NotImplementedError

    def check_same_on_all_ranks(self, elements: Iterable[tuple[Any, ...]]) -> None:
        """Refuse elements, by name, positions and new values, that other processes do not name too.

        All of them get the same answer, so that none is left waiting. Else they would train, each something else.
        """
        if not self.is_distributed:
            return
        elements = list(elements)
        every = self.gathered(np.frombuffer(digest(elements), np.int32))
        if (every != every[0]).any():
            raise unlike(elements)

    @abstractmethod
    def dtype(self, given: Any) -> Any:
        """The framework's dtype for what a user gave."""

    @abstractmethod
    def part(
        self, tensor: Tensor, positions: np.ndarray, dtype: Any, values: Any = None, originals: Any = None
    ) -> ElementGroup:
        """Elements at some positions, with their values now or with values and originals from a file."""

    @abstractmethod
    def start(self, parts: Sequence[ElementGroup], kept: Sequence[Tensor] = ()) -> None:
        """Let parts train: freeze all else but the parameters that are kept, and let the layers know."""

    @abstractmethod
    def cancel(self, parts: Sequence[ElementGroup]) -> None:
        """Undo `start`, as far as it has come, and `write`: parameters hold what they held. Idempotent."""

    @abstractmethod
    def stop(self, parts: Sequence[ElementGroup]) -> None:
        """Let parts train no longer, with the values that they have; after the last the model is as it was."""

    def sync(self, part: ElementGroup) -> None:
        """Let a part's values and its parameter agree, where a write to one does not reach the other at once."""
        return

    @abstractmethod
    def write(self, part: ElementGroup) -> None:
        """Put a part's values into its parameter."""

    @abstractmethod
    def restore(self, part: ElementGroup) -> None:
        """Put a part's originals into its parameter, and into its values."""

    @abstractmethod
    def check_loss(self, loss: Tensor, of: str) -> None:
        """Refuse what is no loss: one number that has a gradient."""

    @abstractmethod
    def gradients(
        self, loss: Tensor, parts: Sequence[ElementGroup], last: bool, tape: Any = None
    ) -> list[Tensor | None]:
        """What parts hear of a loss, None where it does not depend on one; the graph is kept unless it is the last.

        Where the framework records on tapes, by one of them.
        """

    def check_tape(self, tape: Any, losses: int) -> None:
        """Refuse a tape that cannot give the gradients of so many losses, where the framework has tapes."""
        return

    def hear(self, heard: Sequence[tuple[ElementGroup, Tensor, np.ndarray]], losses: Sequence[Tensor]) -> None:
        """Add some elements of gradients of losses to those of parts, where tensors keep their gradients."""
        raise NotImplementedError

    def heard(self, before: Tensor | None, gradient: Tensor, elements: np.ndarray) -> Tensor:
        """Some elements of a gradient added to what was heard before, where they do not."""
        raise NotImplementedError

    def on_rank_zero(self, work: Callable[[], None]) -> None:
        """Do what one process does for all, and go on when it is done; if it fails, all of them hear of it."""
        if not self.is_distributed:
            return work()
        error = None
        if self.is_rank_zero:
            try:
                work()
            except Exception as raised:  # once the others have heard of it
                error = raised
        failed = self.gathered(np.array([error is not None], np.int32))
        if error is not None:
            raise error
        if failed.any():
            raise PatchError("the first process, which writes for all, could not write; its own error says why")
        return None

    @abstractmethod
    def bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """The dtype of a tensor, and the bytes of its elements or of some: uint8, one row each."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of all parameters."""

    def spelled(self) -> Iterator[tuple[str, Tensor]]:
        """Every name of every parameter: one that is tied has several."""
        return ((name, self.parameter(name)) for name in self.names())

    def standing(self, tensor: Tensor) -> TrainingState:
        """Return whether a parameter trains as a whole, where training elements freezes the others."""
        raise NotImplementedError

    def hooked(self, tensor: Tensor) -> bool:
        """Return whether somebody wants to see the gradient of a parameter, which its elements do not make."""
        return False

    def lasting(self, tensor: Tensor) -> Any:
        """What changes of a parameter are noted by, for as long as it lives."""
        return tensor


class ParameterUse(NamedTuple):
    """A use that a loss makes of a parameter of which elements train."""

    name: str
    operation: str
    dense: bool
    """Whether a whole copy of the parameter is made for it, and a whole gradient."""


class FunctionalTrainer(Trainer):
    """Parameters that are never written to: values are optimised apart from them, and merged where needed."""

    freezes = False
    elsewhere: Mapping[str, str] = {
        "parameters": "elements.values, to optimise with optax",
        "variables": "elements.values, to optimise with optax",
        "backward": "elements.grad, which takes functions of the parameters, {place: loss_fn} too",
        "gradients": "elements.grad, which takes functions of the parameters, {place: loss_fn} too",
        "release": "elements.merge(): the parameters themselves were never changed",
    }

    @abstractmethod
    def value(self, part: ElementGroup) -> Tensor:
        """A part's values, in one row that is the caller's own."""

    @abstractmethod
    def keepable(self, part: ElementGroup, value: Tensor, place: str) -> Tensor:
        """A copy of a value that fits a part, for it to have from now on; an error where it would be rounded."""

    @abstractmethod
    def fitting(self, part: ElementGroup, value: Any, place: str) -> Tensor:
        """A value for a part, checked."""

    @abstractmethod
    def merged(
        self, parts: Sequence[ElementGroup], values: Sequence[Tensor], params: Any
    ) -> tuple[Any, dict[int, Tensor]]:
        """All parameters with the values in them, and the new one of each part by its number, unless it is traced."""

    @abstractmethod
    def gradient(
        self,
        loss: Callable[[Any], Any],
        parts: Sequence[ElementGroup],
        values: Sequence[Tensor],
        params: Any,
        wanted: Sequence[int],
        has_aux: bool,
    ) -> tuple[Any, list[Tensor | None]]:
        """What a loss returns, and its gradient for the parts of some numbers; None where it does not depend on one."""

    @abstractmethod
    def zeros(self, like: Tensor) -> Tensor:
        """A gradient that nothing was added to yet."""

    @abstractmethod
    def joined(self, total: Tensor, gradient: Tensor, chosen: np.ndarray) -> Tensor:
        """A gradient with some elements of another one added to it."""

    @abstractmethod
    def uses(
        self, loss: Callable[[Any], Any], parts: Sequence[ElementGroup], values: Sequence[Tensor]
    ) -> list[ParameterUse]:
        """How a loss uses the parameters of parts."""

    def training(self, tensor: Tensor) -> Sequence[ElementGroup]:
        """None that anybody else would have to mind."""
        return ()

    def start(self, parts: Sequence[ElementGroup], kept: Sequence[Tensor] = ()) -> None:
        """Nothing needs to know."""

    def cancel(self, parts: Sequence[ElementGroup]) -> None:
        """Nothing was written."""

    def write(self, part: ElementGroup) -> None:
        """Nothing is written to."""

    def stop(self, parts: Sequence[ElementGroup]) -> NoReturn:
        """There is nothing to stop."""
        raise FrameworkError("these parameters were never changed and need no release; elements.merge() has the values")

    def check_function(self, loss: Any, of: str) -> None:
        """Refuse what is no function that gives a loss."""
        if not callable(loss):
            raise FrameworkError(f"the loss for {of} is {type(loss).__name__}; give a function of the parameters")

    def check_loss(self, loss: Tensor, of: str) -> NoReturn:
        """Refuse a loss, whichever it is."""
        raise FrameworkError("a loss that is computed already has no gradient here; give its function to elements.grad")

    def gradients(self, loss: Tensor, parts: Sequence[ElementGroup], last: bool, tape: Any = None) -> NoReturn:
        """Refuse a loss, whichever it is."""
        self.check_loss(loss, "")
