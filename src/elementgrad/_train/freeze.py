"""Freezing: while elements of a model train, its parameters hold still, and train again after the last release.

Several calls of `eg.trainable` may freeze one parameter. Each of them owns a share of the parameter's claim, which
remembers whether the parameter was trainable before; the last owner to leave gives that back.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elementgrad._cleanup import defer

Parameter = Any


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
