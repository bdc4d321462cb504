"""The interface that a framework implements so that elements of its models train.

A `Trainer` is made for one model. It finds parameters by name, makes an `ElementGroup` for each place that trains, and
starts and stops their training. JAX implements `FunctionalTrainer`, as its parameters are never written to.

While elements train, a `Freezer` holds the parameters still. Several calls of `eg.trainable` may freeze one parameter.
Each of them owns a share of the parameter's claim, which remembers whether the parameter was trainable before; the last
owner to leave gives that back.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from elementgrad._cleanup import defer
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._train.bits import BitArray
from elementgrad._train.history import ElementChange, ReadBytes, TensorHistory
from elementgrad.errors import FrameworkError, PatchError, PlaceError

Tensor = Any
Parameter = Any


@dataclass(frozen=True, eq=False)
class ResolvedPlace:
    """A place in a model: the parameter it names, and which of its elements."""

    place: Place
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    positions: np.ndarray
    """Flat positions in the parameter, in the order of the place."""
    current: BitArray | None = None
    """The values there, in the same order, if they have been read."""


class ElementGroup:
    """The elements of one place, with a tensor of their own that an optimizer moves: the leaf."""

    parameter: "PartialParameter | None" = None
    """The parameter with all of its groups, while they train."""
    change: ElementChange
    """The entry in the parameter's history; its `bits` are those of the originals, and must follow them."""

    def __init__(self, target: ResolvedPlace, leaf: Tensor, originals: Tensor, initial: Tensor):
        self.place, self.name, self.shape = target.place, target.name, target.shape
        self.tensor = target.tensor
        self.positions = target.positions
        self.leaf = leaf
        """The values, as a vector."""
        self.originals = originals
        """The values before any training, in the parameter's dtype."""
        self.initial = initial
        """The values when the group was made; other than `originals` when a patch is trained further."""


class PartialParameter:
    """A parameter of which only some elements train: one group for each place."""

    tensor: Tensor
    groups: list[Any]
    sizes: list[int]
    """The number of elements of each group."""
    positions: np.ndarray
    """The positions of all of them."""

    def refresh(self) -> None:
        """Recompute what depends on the groups, after they have changed."""
        positions = [group.positions for group in self.groups]
        self.sizes = [len(each) for each in positions]
        self.positions = positions[0] if len(positions) == 1 else np.concatenate([np.zeros(0, np.int64), *positions])

    def remove(self, groups: Iterable[ElementGroup]) -> None:
        """Remove groups, where they are among its own."""
        ids = set(map(id, groups))
        self.groups[:] = [group for group in self.groups if id(group) not in ids]


def groups_by_tensor(groups: Iterable[Any]) -> list[list[Any]]:
    """Return groups, or resolved places, in one list for each parameter."""
    together: dict[int, list[Any]] = {}
    for group in groups:
        together.setdefault(id(group.tensor), []).append(group)
    return list(together.values())


def parameters_of(groups: Iterable[ElementGroup]) -> list[Any]:
    """Return the partial parameters of groups that train, each once."""
    return list({id(group.parameter): group.parameter for group in groups if group.parameter is not None}.values())


class TrainingState(NamedTuple):
    """The state of a parameter as a whole, apart from elements of it that train."""

    trained: bool
    """True if it was trainable before any elements of the model trained."""
    claimed: bool = False
    """True if `eg.trainable` has claimed it, be it frozen or kept."""
    kept: bool = False
    """True if `keep=` lets it go on training."""
    can_train: bool = True
    """True if its dtype has gradients."""


@dataclass
class FreezeClaim:
    """The state of a parameter before it was frozen, and the calls of `eg.trainable` that need it frozen."""

    trainable: bool
    gradient: Any = None
    owners: set[object] = field(default_factory=set)
    keepers: set[object] = field(default_factory=set)
    """The owners whose `keep=` names the parameter."""


class Freezer(ABC):
    """Freezes and thaws the parameters of one framework."""

    @abstractmethod
    def get_claim(self, parameter: Parameter) -> FreezeClaim | None:
        """Return the claim on a parameter."""

    @abstractmethod
    def set_claim(self, parameter: Parameter, claim: FreezeClaim | None) -> None:
        """Store the claim on a parameter for as long as the parameter lives, or remove it."""

    @abstractmethod
    def is_trainable(self, parameter: Parameter) -> bool:
        """Return the framework's flag of a parameter."""

    @abstractmethod
    def set_trainable(self, parameter: Parameter, trainable: bool) -> None:
        """Set the framework's flag of a parameter."""

    def get_gradient(self, parameter: Parameter) -> Any:
        """Return the gradient that a parameter holds, where parameters hold gradients."""
        return None

    def set_gradient(self, parameter: Parameter, gradient: Any) -> None:
        """Set the gradient that a parameter holds, where parameters hold gradients."""
        return

    def claim(self, parameters: Iterable[Parameter], owner: object, keep: Iterable[Parameter] = ()) -> None:
        """Freeze parameters that are not frozen yet, except those in `keep`.

        A parameter that is claimed already is left alone: the user may have made it trainable again since then.
        """
        kept = {id(parameter) for parameter in keep}
        for parameter in parameters:
            is_kept = id(parameter) in kept
            claim = self.get_claim(parameter)
            if claim is None:
                gradient = None if is_kept else self.get_gradient(parameter)
                claim = FreezeClaim(self.is_trainable(parameter), gradient, {owner}, {owner} if is_kept else set())
                self.set_claim(parameter, claim)
                if not is_kept:
                    self.set_trainable(parameter, False)
                    # An optimizer moves whatever has a gradient, even one that is left over from before.
                    self.set_gradient(parameter, None)
                continue
            claim.owners.add(owner)
            if is_kept:
                defer(self.set_trainable, parameter, self.is_trainable(parameter))
                claim.keepers.add(owner)
                self.set_trainable(parameter, claim.trainable or self.is_trainable(parameter))

    def leave(self, parameters: Iterable[Parameter], owner: object) -> None:
        """Give up the claims of an owner; the last one thaws the parameter."""
        for parameter in parameters:
            claim = self.get_claim(parameter)
            if claim is None or owner not in claim.owners:
                continue
            if len(claim.owners) == 1:
                self.set_trainable(parameter, claim.trainable or self.is_trainable(parameter))
                if self.get_gradient(parameter) is None:
                    self.set_gradient(parameter, claim.gradient)
                self.set_claim(parameter, None)
            claim.keepers.discard(owner)
            claim.owners.discard(owner)

    def state(self, parameter: Parameter, can_train: bool = True) -> TrainingState:
        """Return the state of a parameter as a whole."""
        claim = self.get_claim(parameter)
        if claim is None:
            return TrainingState(self.is_trainable(parameter), can_train=can_train)
        return TrainingState(claim.trainable, claimed=True, kept=bool(claim.keepers), can_train=can_train)


class Trainer(ABC):
    """One model whose elements train."""

    alternatives: Mapping[str, str] = {}
    """Methods of `Elements` that are for other frameworks, and what to write here instead."""
    noun = "parameter"
    """The framework's word for a tensor that trains."""
    other_nouns: Mapping[str, str] = {}
    """The words for other named things, by their kind."""
    separator = "."
    """The separator between the components of a name."""
    freezes = True
    """True if parameters are frozen while elements train."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield one name for each parameter."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every name of every parameter; tied parameters have several."""
        return ((name, self.parameter(name)) for name in self.names())

    def aliases(self) -> Mapping[str, str]:
        """Return other spellings of names, each with the name."""
        return {}

    def stable_name(self, name: str) -> str:
        """Return the name of a parameter that is the same in every process and every copy of the model."""
        return name

    @abstractmethod
    def parameter(self, name: str) -> Tensor:
        """Return the parameter of a name, or raise an error that says which names fit."""

    @abstractmethod
    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter; raise an error for another tensor."""

    def only_parameter(self) -> str:
        """Return the name of the only parameter, for a place that names none."""
        names = list(self.names())
        if len(names) != 1:
            raise PlaceError(f"there are {len(names)} {self.noun}s; name one: {listed(names)}")
        return names[0]

    def unknown_name_error(self, name: str, kind: str | None) -> PlaceError:
        """Return the error for a name that is no parameter's, but maybe that of something of another kind."""
        names = list(self.names())
        if kind is None:
            return PlaceError(f"no {self.noun} named {name!r}; {nearest(name, names)}")
        inside = [other for other in names if other.startswith(name + self.separator)]
        hint = f"it has {listed(inside)}" if inside else nearest(name, names)
        return PlaceError(f"{name!r} is {self.other_nouns[kind]} and only {self.noun}s train; {hint}")

    def not_a_parameter_error(self, tensor: Tensor) -> PlaceError:
        """Return the error for a tensor that is none of the parameters."""
        names = listed(list(self.names()))
        return PlaceError(f"a tensor of shape {tuple(tensor.shape)} is no {self.noun} here; there are: {names}")

    @abstractmethod
    def check_parameter(self, tensor: Tensor, name: str) -> None:
        """Raise an error for a parameter whose elements cannot train."""

    def training_state(self, tensor: Tensor) -> TrainingState:
        """Return the state of a parameter as a whole, where training elements freezes parameters."""
        raise NotImplementedError

    def has_gradient_hooks(self, tensor: Tensor) -> bool:
        """Return True if a parameter has hooks on its gradient, which is not computed when elements train."""
        return False

    @abstractmethod
    def read_bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """Return the dtype of a tensor, and the bytes of all or some of its elements: uint8, one row per element."""

    def dtype_name(self, tensor: Tensor) -> str:
        """Return the name of a tensor's dtype, without reading an element."""
        return self.read_bits(tensor, np.zeros(0, np.int64))[0]

    def byte_reader(self, tensor: Tensor) -> ReadBytes:
        """Return a function from flat positions to the bytes there."""
        return lambda positions: self.read_bits(tensor, positions)[1]

    def history_key(self, tensor: Tensor) -> Any:
        """Return the object with which the history of a parameter lives and dies."""
        return tensor

    def history(self, tensor: Tensor) -> TensorHistory:
        """Return the history of a parameter's changes."""
        return TensorHistory(self.history_key(tensor), self.byte_reader(tensor))

    @abstractmethod
    def parse_dtype(self, dtype: Any) -> Any:
        """Return the framework's dtype for the option `dtype=`."""

    @abstractmethod
    def make_group(self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None) -> ElementGroup:
        """Make the group of a place, from the parameter's values or from those of a patch; nothing trains yet."""

    @abstractmethod
    def groups_of(self, tensor: Tensor) -> Sequence[ElementGroup]:
        """Return the groups of a parameter that train now."""

    @abstractmethod
    def start(self, groups: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        """Let groups train: freeze all parameters but those in `keep`, and attach the leaves to the layers."""

    @abstractmethod
    def stop(self, groups: Sequence[Any]) -> None:
        """End the training of groups, which keep their values; after the last one the model is a plain model."""

    @abstractmethod
    def cancel(self, groups: Sequence[Any]) -> None:
        """Undo `start`, however far it came, and `write_to_parameter`. Idempotent."""

    def sync(self, groups: Sequence[Any]) -> None:
        """Make leaves and parameters agree, where a write to one of them does not reach the other at once."""
        return

    @abstractmethod
    def write_to_parameter(self, group: Any) -> None:
        """Copy a group's values into its parameter."""

    @abstractmethod
    def restore(self, group: Any) -> None:
        """Copy a group's originals into its parameter and its leaf."""

    @abstractmethod
    def check_loss(self, loss: Tensor, of: object) -> None:
        """Raise an error for a loss that is not one number with a gradient; `of` prints as its places."""

    def check_tape(self, tape: Any, losses: int) -> None:
        """Raise an error for a tape that cannot differentiate `losses` losses, where the framework has tapes."""
        return

    @abstractmethod
    def gradients(self, loss: Tensor, groups: Sequence[Any], last: bool, tape: Any = None) -> list[Tensor | None]:
        """Differentiate a loss for groups; None where it does not depend on one.

        The graph is kept unless this is the last loss. `tape` is used where the framework has tapes.
        """

    def add_gradient(self, total: Any, gradient: Tensor, elements: np.ndarray) -> Tensor:
        """Return `total`, which may be None, plus the chosen elements of a gradient."""
        raise NotImplementedError

    def accumulate_gradients(
        self, groups: Sequence[Any], gradients: Sequence[Tensor | None], losses: Sequence[Tensor]
    ) -> None:
        """Add gradients of losses to those of the leaves, where tensors hold their gradients."""
        raise NotImplementedError

    @property
    def is_distributed(self) -> bool:
        """True if several processes share the parameters and make the same calls."""
        return False

    @property
    def is_rank_zero(self) -> bool:
        """True for the process that writes files for all."""
        raise NotImplementedError

    def allgather(self, row: np.ndarray) -> np.ndarray:
        """Return the int32 rows of all processes, each of which must call this."""
        raise NotImplementedError

    def check_same_on_all_ranks(self, elements: Iterable[tuple[Any, ...]]) -> None:
        """Raise an error unless all processes train the same elements, given as (name, positions, new values).

        The error is raised in all processes, so that none is left waiting for the others.
        """
        if not self.is_distributed:
            return
        elements = list(elements)
        digests = self.allgather(np.frombuffer(elements_digest(elements), np.int32))
        if (digests != digests[0]).any():
            raise rank_mismatch_error(elements)

    def on_rank_zero(self, work: Callable[[], None]) -> None:
        """Run `work` in one process for all of them, and wait for it; if it fails, raise in all of them."""
        if not self.is_distributed:
            return work()
        error = None
        if self.is_rank_zero:
            try:
                work()
            except Exception as raised:  # raised below, once the other processes know
                error = raised
        failed = self.allgather(np.array([error is not None], np.int32))
        if error is not None:
            raise error
        if failed.any():
            raise PatchError("the first process, which writes for all, could not write; its own error says why")
        return None


def elements_digest(elements: Iterable[tuple[Any, ...]]) -> bytes:
    """Return a hash of elements, given as a name and arrays each, by which processes compare them."""
    digest = hashlib.sha256()
    for name, *arrays in elements:
        digest.update(repr((name, [array.shape for array in arrays])).encode())
        for array in arrays:
            digest.update(array.tobytes())
    return digest.digest()


def rank_mismatch_error(elements: Sequence[tuple[Any, ...]]) -> FrameworkError:
    """Return the error for elements that are not those of the other processes."""
    names = listed(list(dict.fromkeys(name for name, *_ in elements)))
    return FrameworkError(
        f"this process has {sum(len(arrays[0]) for _, *arrays in elements)} elements in {names}, and another that "
        "trains the model has others, or other values for them; name the same ones in each, in the same order"
    )


class ParameterUse(NamedTuple):
    """One operation of a loss on a parameter of which elements train."""

    name: str
    operation: str
    dense: bool
    """True if it needs a copy of the whole parameter, and a whole gradient, however large these are."""


class FunctionalTrainer(Trainer):
    """A trainer for parameters that are never written to: values live apart, and are merged where needed."""

    freezes = False
    alternatives: Mapping[str, str] = {
        "parameters": "elements.values, to optimise with optax",
        "variables": "elements.values, to optimise with optax",
        "backward": "elements.grad, which takes functions of the parameters, {place: loss_fn} too",
        "gradients": "elements.grad, which takes functions of the parameters, {place: loss_fn} too",
        "release": "elements.merge(): the parameters themselves were never changed",
    }

    @abstractmethod
    def copy_value(self, group: Any) -> Tensor:
        """Return a copy of a group's values, which the caller may donate."""

    @abstractmethod
    def check_value(self, group: Any, value: Any, place: str) -> Tensor:
        """Return the user's value for a group as a tensor; raise an error if it does not fit."""

    @abstractmethod
    def new_leaf(self, group: Any, value: Tensor, place: str) -> Tensor:
        """Return a copy of a checked value to be the group's leaf; raise an error if it would be rounded."""

    @abstractmethod
    def merge(self, groups: Sequence[Any], values: Sequence[Tensor], params: Any) -> tuple[Any, dict[int, Tensor]]:
        """Return all parameters with the values in them, and the new tensor of each group unless it is traced."""

    @abstractmethod
    def value_and_grad(
        self,
        loss: Callable[[Any], Any],
        groups: Sequence[Any],
        values: Sequence[Tensor],
        params: Any,
        wanted: Sequence[int],
        has_aux: bool,
    ) -> tuple[Any, list[Tensor | None]]:
        """Return what a loss returns, and its gradients for `wanted` groups; None where it does not depend on one."""

    @abstractmethod
    def zeros_like(self, value: Tensor) -> Tensor:
        """Return the gradient of a group without a loss."""

    @abstractmethod
    def parameter_uses(
        self, loss: Callable[[Any], Any], groups: Sequence[Any], values: Sequence[Tensor]
    ) -> list[ParameterUse]:
        """Return the operations of a loss on the parameters of groups."""

    def check_function(self, loss: Any, of: object) -> None:
        """Raise an error for a loss that is not a function."""
        if not callable(loss):
            raise FrameworkError(f"the loss for {of} is {type(loss).__name__}; give a function of the parameters")

    def groups_of(self, tensor: Tensor) -> Sequence[ElementGroup]:
        """Return nothing: groups are independent of each other."""
        return ()

    def start(self, groups: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        """Do nothing: the model is not changed."""

    def cancel(self, groups: Sequence[Any]) -> None:
        """Do nothing: the model is not changed."""

    def write_to_parameter(self, group: Any) -> None:
        """Do nothing: parameters are not written to."""

    def stop(self, groups: Sequence[Any]) -> NoReturn:
        """Raise an error, since nothing was started."""
        raise FrameworkError("these parameters were never changed and need no release; elements.merge() has the values")

    def check_loss(self, loss: Tensor, of: object) -> NoReturn:
        """Raise an error, since only functions have gradients here."""
        raise FrameworkError("a loss that is computed already has no gradient here; give its function to elements.grad")

    def gradients(self, loss: Tensor, groups: Sequence[Any], last: bool, tape: Any = None) -> NoReturn:
        """Raise the error of `check_loss`."""
        self.check_loss(loss, "")


class TrainBackend(ABC):
    """Makes the trainers of models."""

    @abstractmethod
    def trainer(self, model: Any) -> Trainer:
        """Return the trainer of a model's elements; raise `FrameworkError` for what is no model."""

    @abstractmethod
    def tensor_bits(self, tensor: Tensor) -> tuple[str, np.ndarray]:
        """Return the dtype of a tensor, and the bytes of its elements: uint8, one row per element."""

    @abstractmethod
    def from_bits(self, bits: np.ndarray, like: Tensor) -> Tensor:
        """Return a tensor with these bytes, of the dtype, shape and device of another one."""
