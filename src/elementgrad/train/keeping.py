"""Parameters that stay trainable as a whole beside elements, and warnings about what no longer trains."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from elementgrad.backends.training import Trainer
from elementgrad.errors import DuplicateError, OptionError, PlaceError, warn
from elementgrad.text import listed, nearest
from elementgrad.train.named import Named

Tensor = Any
Spelled = Sequence[tuple[str, Tensor]]
"""Every name of every parameter."""
Keep = str | Iterable[str] | None
"""A name or a wildcard, or several of them."""


def spared(trainer: Trainer, keep: Keep, named: Sequence[Named]) -> list[Tensor]:
    """Return the parameters that `keep` names; without it, warn about those that train now and will not.

    An empty list says that none is to train. Nothing is changed yet, so that a warning that is turned into an error
    leaves the model alone.
    """
    if not trainer.freezes:
        if keep is not None:
            raise OptionError(
                "keep= names parameters that stay trainable while all others are frozen, and here nothing is frozen; "
                "leave it out, and optimise other arrays beside elements.values"
            )
        return []
    every = list(trainer.spelled())
    matched = [match for pattern in _patterns(keep) for match in _matching(trainer, pattern, every)]
    found = {id(tensor): tensor for _, tensor in matched}
    for one in named:
        if id(one.tensor) in found:
            raise DuplicateError(
                f"keep={keep!r} lets all of {one.name} train, and {one.place} some of it; leave one of them out"
            )
        if trainer.standing(one.tensor).kept:
            raise DuplicateError(
                f"all of {one.name} trains, as keep= of an earlier eg.trainable says, and {one.place} names some of "
                "it; release those elements first"
            )
    for name, tensor in matched:
        if trainer.training(tensor):
            raise DuplicateError(f"keep={keep!r} lets all of {name} train, and elements of it do; release them first")
    if keep is None:
        _warn_of_frozen(trainer, every, [id(one.tensor) for one in named])
    _warn_of_hooks(trainer, named)
    return list(found.values())


def _patterns(keep: Keep) -> list[str]:
    if keep is None:
        return []
    patterns: list[Any] = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else [keep]
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise OptionError(f"keep={keep!r} names no parameters; give a name or a wildcard, such as 'lora_*', or a list")
    return patterns


def _matching(trainer: Trainer, pattern: str, every: Spelled) -> Spelled:
    """Return the parameters of that very name, or else those of which it matches some successive parts of the name.

    So `lora_*` is `base_model.model.h.0.attn.lora_A.default.weight` too, and `head` is all that `head` holds.
    """
    found = [(name, tensor) for name, tensor in every if name == pattern]
    found = found or [(name, tensor) for name, tensor in every if _matches(pattern, name, trainer.separator)]
    if not found:
        raise PlaceError(f"keep={pattern!r} names no {trainer.kind}; {nearest(pattern, [name for name, _ in every])}")
    if not any(trainer.standing(tensor).trained for _, tensor in found):
        names = listed([name for name, _ in found])
        raise OptionError(f"keep={pattern!r} names {names}, which did not train before; let it train first")
    return found


def _matches(pattern: str, name: str, separator: str) -> bool:
    parts = name.split(separator)
    runs = ((first, last) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
    return any(fnmatchcase(separator.join(parts[first:last]), pattern) for first, last in runs)


def _warn_of_frozen(trainer: Trainer, every: Spelled, others: Collection[int]) -> None:
    """Warn about parameters that somebody has chosen to train, by leaving others out, and that are frozen now."""
    names = {id(tensor): name for name, tensor in reversed(every)}
    standing = {id(tensor): trainer.standing(tensor) for _, tensor in every}
    new = [key for key, one in standing.items() if one.able and not one.claimed]
    frozen = [names[key] for key in new if standing[key].trained and key not in others]
    if frozen and not all(standing[key].trained for key in new):
        warn(
            f"{listed(frozen)} trained before, while others of the model did not, and eg.trainable freezes "
            f"{'it' if len(frozen) == 1 else 'them'}; name what is to go on training by keep={frozen[0]!r}, a wildcard "
            "or a list"
        )


def _warn_of_hooks(trainer: Trainer, named: Sequence[Named]) -> None:
    for one in {id(one.tensor): one for one in named}.values():
        if trainer.hooked(one.tensor):
            warn(
                f"{one.name} has gradient hooks, which do not run for elements of it; register them on the tensors "
                "that elements.parameters() gives"
            )
