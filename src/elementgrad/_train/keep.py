"""`keep=` of `eg.trainable`: the parameters that go on training as a whole while all others are frozen."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from elementgrad._place.grammar import listed, nearest
from elementgrad._train.trainer import ElementGroup, Trainer
from elementgrad.errors import DuplicateError, OptionError, PlaceError, warn

Tensor = Any
NamedParameters = Sequence[tuple[str, Tensor]]
"""Every name of every parameter."""
Keep = str | Iterable[str] | None
"""A name or a wildcard, or several of them."""


def find_kept(trainer: Trainer, keep: Keep, groups: Sequence[ElementGroup]) -> list[Tensor]:
    """Return the parameters that `keep` names; without it, warn about those that train now and will not.

    Nothing is changed yet, so that a warning that is turned into an error leaves the model alone.
    """
    if not trainer.freezes:
        if keep is not None:
            raise OptionError(
                "keep= names parameters that stay trainable while all others are frozen, and here nothing is frozen; "
                "leave it out, and optimise other arrays together with elements.values"
            )
        return []
    every = list(trainer.named_parameters())
    matches = [match for pattern in _patterns(keep) for match in _match_names(trainer, pattern, every)]
    kept = {id(tensor): tensor for _, tensor in matches}
    for group in groups:
        if id(group.tensor) in kept:
            raise DuplicateError(
                f"keep={keep!r} lets all of {group.name} train, and {group.place} some of it; leave one of them out"
            )
        if trainer.training_state(group.tensor).kept:
            raise DuplicateError(
                f"all of {group.name} trains, as keep= of an earlier eg.trainable says, and {group.place} names some "
                "of it; release those elements first"
            )
    for name, tensor in matches:
        if trainer.groups_of(tensor):
            raise DuplicateError(f"keep={keep!r} lets all of {name} train, and elements of it do; release them first")
    if keep is None:
        _warn_of_frozen(trainer, every, [id(group.tensor) for group in groups])
    _warn_of_hooks(trainer, groups)
    return list(kept.values())


def _patterns(keep: Keep) -> list[str]:
    if keep is None:
        return []
    patterns: list[Any] = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else [keep]
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise OptionError(f"keep={keep!r} names no parameters; give a name or a wildcard, such as 'lora_*', or a list")
    return patterns


def _match_names(trainer: Trainer, pattern: str, every: NamedParameters) -> NamedParameters:
    """Return the parameters with exactly this name, or else those in whose name it matches consecutive parts.

    So `lora_*` is `base_model.model.h.0.attn.lora_A.default.weight` too, and `head` is all that `head` holds.
    """
    matches = [(name, tensor) for name, tensor in every if name == pattern]
    matches = matches or [(name, tensor) for name, tensor in every if _is_match(pattern, name, trainer.separator)]
    if not matches:
        raise PlaceError(f"keep={pattern!r} names no {trainer.noun}; {nearest(pattern, [name for name, _ in every])}")
    if not any(trainer.training_state(tensor).trained for _, tensor in matches):
        names = listed([name for name, _ in matches])
        raise OptionError(f"keep={pattern!r} names {names}, which did not train before; let it train first")
    return matches


def _is_match(pattern: str, name: str, separator: str) -> bool:
    parts = name.split(separator)
    runs = ((first, last) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
    return any(fnmatchcase(separator.join(parts[first:last]), pattern) for first, last in runs)


def _warn_of_frozen(trainer: Trainer, every: NamedParameters, partly_trained: Collection[int]) -> None:
    """Warn about parameters that the user chose to train, by freezing others, and that are frozen now."""
    names = {id(tensor): name for name, tensor in reversed(every)}
    states = {id(tensor): trainer.training_state(tensor) for _, tensor in every}
    new = [key for key, state in states.items() if state.can_train and not state.claimed]
    frozen = [names[key] for key in new if states[key].trained and key not in partly_trained]
    if frozen and not all(states[key].trained for key in new):
        warn(
            f"{listed(frozen)} trained before, while others of the model did not, and eg.trainable freezes "
            f"{'it' if len(frozen) == 1 else 'them'}; name what should stay trainable by keep={frozen[0]!r}, a "
            "wildcard or a list"
        )


def _warn_of_hooks(trainer: Trainer, groups: Sequence[ElementGroup]) -> None:
    for group in {id(group.tensor): group for group in groups}.values():
        if trainer.has_gradient_hooks(group.tensor):
            warn(
                f"{group.name} has gradient hooks, which do not run for elements of it; register them on the tensors "
                "that elements.parameters() gives"
            )
