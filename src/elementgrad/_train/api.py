"""Parameters that stay trainable as a whole beside elements, and warnings about what no longer trains.

`trainable` and `apply`: how elements of a model come to train, and how a patch comes into a model.

The patch that takes other patches back, of a model that holds them.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from elementgrad._backends.registry import uncompiled
from elementgrad._cleanup import defer, with_rollback
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._train.elements import Elements, TrainedPlace, reader
from elementgrad._train.entries import NamedElements, all_named, element, named, require_disjoint, trainer_of
from elementgrad._train.fingerprint import fingerprint, fits
from elementgrad._train.history import Change, ChangeLog
from elementgrad._train.numbers import BitArray
from elementgrad._train.patch import Entry, MappedEntry, Names, Patch, mapped
from elementgrad._train.trainer import FunctionalTrainer, Trainer
from elementgrad.errors import DuplicateError, ElementgradError, OptionError, PatchError, PlaceError, warn

Tensor = Any
Spelled = Sequence[tuple[str, Tensor]]
"""Every name of every parameter."""
Keep = str | Iterable[str] | None
"""A name or a wildcard, or several of them."""


def spared(trainer: Trainer, keep: Keep, named: Sequence[NamedElements]) -> list[Tensor]:
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


def _warn_of_hooks(trainer: Trainer, named: Sequence[NamedElements]) -> None:
    for one in {id(one.tensor): one for one in named}.values():
        if trainer.hooked(one.tensor):
            warn(
                f"{one.name} has gradient hooks, which do not run for elements of it; register them on the tensors "
                "that elements.parameters() gives"
            )


ENDING = ".safetensors"
Model = Any


@with_rollback
@uncompiled
def trainable(
    model: Model, places: Any, *, dtype: Any = None, names: Names | None = None, keep: Keep = None
) -> Elements:
    """Let only the named elements of a model train; every other element of its parameters stays as it is, to the bit.

    Give `elements.parameters()` to any optimizer that takes vectors, with any options. `places` are texts or places, or
    the path of a patch to go on from, with `names` as in `eg.apply`. Values of parameters in half precision are kept in
    float32 unless `dtype` says otherwise. All parameters are frozen (`requires_grad`) until `elements.release()`, but
    for those that `keep` names, which go on as they were: a name of a parameter or layer, a wildcard such as `"lora_*"`
    for whole parts of a name, or a list of them. A Keras model is compiled and fitted as ever, and has
    `elements.variables`. Of a model that processes share, wrap in `DistributedDataParallel` afterwards, or call
    `fully_shard` before: then all of them make this call.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2))
    >>> before = model[0].weight.clone()
    >>> elements = eg.trainable(model, "0.weight[0, 5]")
    >>> optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.5)
    >>> model(torch.tensor([0, 3])).sum().backward()
    >>> optimizer.step()
    >>> (model[0].weight != before).nonzero()
    tensor([[0, 5]])
    """
    trainer = trainer_of(model)
    kept = trainer.dtype(dtype)
    if isinstance(places, os.PathLike) or (isinstance(places, str) and places.endswith(ENDING)):
        entries = mapped(Patch.read(places), names)
        _agree_on(trainer, entries)
        found = _fitting(trainer, entries, resume=True)
        parts = [trainer.part(one.tensor, one.positions, kept, entry.values, entry.originals) for one, entry in found]
        every = [one for one, _ in found]
    else:
        if names is not None:
            raise OptionError("names= maps the names in a patch, and these are places; leave it out")
        every = all_named(trainer, places)
        for one in every:
            _require_idle(trainer, one)
        trainer.check_same_on_all_ranks((one.name, one.positions) for one in every)
        parts = [trainer.part(one.tensor, one.positions, kept) for one in every]
    beside = spared(trainer, keep, every)
    defer(trainer.cancel, parts)
    trainer.start(parts, beside)
    members = [_member(trainer, one, part) for one, part in zip(every, parts, strict=True)]
    return Elements(trainer, members, training=True)


@with_rollback
@uncompiled
def apply(
    model: Model, path: str | os.PathLike[str] | Patch, *, overwrite: bool = False, names: Names | None = None
) -> Elements:
    """Put the values of a patch into a model, which stays a plain model; `undo` takes them back, to the bit.

    It is given by the path of its file or as `eg.inspect` read it.
    The patch is refused, and the model left as it is, unless the tensors are those that it was made for. Patches of
    other elements may be applied before; one that overlaps needs `overwrite`. The same network may have other names for
    its tensors, and their axes in another order, as in another framework: `names` is a dict from names in the patch to
    names in the model, or to a name and the order of axes, as `numpy.transpose` takes it.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> pristine = copy.deepcopy(model)
    >>> elements = eg.trainable(model, "bias[1]")
    >>> with torch.no_grad():
    ...     _ = elements["bias[1]"].fill_(7.0)
    >>> elements.save(path)
    >>> applied = eg.apply(pristine, path)
    >>> pristine.bias[1].item()
    7.0
    >>> applied.undo()
    >>> other = torch.nn.ParameterDict({"offset": pristine.bias.detach().clone()})
    >>> eg.apply(other, path, names={"bias": "offset"}).places
    (Place.parse('offset[1]'),)
    """
    trainer = trainer_of(model)
    if not isinstance(path, str | os.PathLike | Patch):
        raise PatchError(f"{type(path).__name__} is not the path of a patch; give one, such as 'patch.safetensors'")
    patch = path if isinstance(path, Patch) else Patch.read(path)
    entries = mapped(patch, names)
    _agree_on(trainer, entries)
    found = _fitting(trainer, entries, overwrite)
    parts = [trainer.part(one.tensor, one.positions, None, entry.values) for one, entry in found]
    defer(trainer.cancel, parts)
    members = [_member(trainer, one, part) for (one, _), part in zip(found, parts, strict=True)]
    for member in members:
        trainer.write(member.part)
        member.mark.written = trainer.bits(member.tensor, member.positions)[1]
    return Elements(trainer, members, training=False)


def _member(trainer: Trainer, one: NamedElements, part: Any) -> TrainedPlace:
    mark = part.mark = Change(str(one.place), one.positions, trainer.bits(part.originals)[1])
    if not isinstance(trainer, FunctionalTrainer):  # where nothing is written to, nothing is to be noted
        ledger = ChangeLog(one.tensor, reader(trainer, one.tensor))
        defer(ledger.remove, mark)
        ledger.add(mark)
    return TrainedPlace(one.place, one.name, one.tensor, one.shape, one.positions, part, mark)


def _agree_on(trainer: Trainer, entries: Sequence[MappedEntry]) -> None:
    """Before anything is read that other processes may have."""
    trainer.check_same_on_all_ranks((one.entry.name, one.entry.indices, one.entry.values.bits) for one in entries)


def _require_idle(trainer: Trainer, one: NamedElements) -> None:
    for part in trainer.training(one.tensor):
        for twice in one.positions[np.isin(one.positions, part.positions)][:1]:
            which = element(one.name, one.shape, twice)
            raise DuplicateError(f"{which} of {one.place} trains already; release those elements first")


def _fitting(
    trainer: Trainer, entries: Sequence[MappedEntry], overwrite: bool = False, resume: bool = False
) -> list[tuple[NamedElements, Entry]]:
    """The parameters that a patch is for, each checked before anything is changed."""
    found = [(_fitted(trainer, one, overwrite, resume), one.entry) for one in entries]
    try:
        require_disjoint([one for one, _ in found])  # names that are tied here may not be where the patch was made
    except DuplicateError as error:
        raise PatchError(f"the patch does not fit: {error}") from None
    return found


def _fitted(trainer: Trainer, given: MappedEntry, overwrite: bool, resume: bool) -> NamedElements:
    entry, source = given.entry, given.source
    source.require_applicable()
    try:
        tensor = trainer.parameter(entry.name)
    except ElementgradError as error:
        other = "; names= says what it is called here" if entry.name == source.name else ""
        raise PatchError(f"the patch does not fit: {error}{other}") from None
    trainer.check(tensor, entry.name)
    shape, (dtype, _) = tuple(tensor.shape), trainer.bits(tensor, np.zeros(0, np.int64))
    if (shape, dtype) != (entry.shape, entry.dtype):
        raise PatchError(_unlike(given, shape, dtype))
    one = named(trainer, Place.parse(entry.place))
    if one.tensor is not tensor:
        raise PatchError(f"the patch takes {entry.place} for {entry.name}, and here it is another tensor")
    _require_idle(trainer, one)
    if entry.name == source.name and entry.tied is not None:  # by other names of other models nothing is known of ties
        _require_tied(trainer, tensor, entry.name, entry.tied)
    read = reader(trainer, tensor)
    ledger = ChangeLog(trainer.lasting(tensor), read)
    over = ledger.overlapping(entry.indices)
    again = resume and over is not None and np.array_equal(over.positions, entry.indices)
    if over is not None and not (overwrite or again):
        raise PatchError(
            f"{entry.place} overlaps {over.place}, which was changed before; undo that first, or give overwrite=True"
        )
    positions, bits = ledger.changed()
    there = None if positions is None else given.there(positions)
    same = np.array_equal(ledger.before(entry.indices), entry.originals.bits)
    known = source.fingerprint, source.shape, dtype
    if not same or not fits(*known, lambda some: read(given.here(some)), positions=there, bits=bits):
        raise PatchError(
            f"{entry.name} is not the tensor that the patch was made for: "
            + ("other elements of it differ" if same else f"{entry.place} held other values there")
            + "; give the model as it was before training"
            + (", and the right order of axes" if given.turned else "")
        )
    return one


def _require_tied(trainer: Trainer, tensor: Any, name: str, there: Sequence[str]) -> None:
    """Refuse a tensor that bears other names than where the patch was made, so that too much or too little changes."""
    every = list(trainer.spelled())
    here = [other for other, held in every if held is tensor and other != name]
    apart = [other for other, held in every if other in there and held is not tensor]
    if apart:
        raise PatchError(
            f"the patch was made where {name} and {listed(apart)} are one tensor, and here they are not: it would "
            "change one of them alone; tie them first, or leave all but one out of a file"
        )
    more = [other for other in here if other not in there]
    if more:
        raise PatchError(
            f"{name} and {listed(more)} are one tensor here, and were not where the patch was made: it would change "
            "both; give the model as it was"
        )


def _unlike(given: MappedEntry, shape: tuple[int, ...], dtype: str) -> str:
    entry, source = given.entry, given.source
    turned = f", which axes {given.axes} make {entry.shape}" if given.turned else ""
    here = "it" if entry.name == source.name else entry.name
    hint = (
        "; names= takes the order of its axes" if shape != entry.shape and sorted(shape) == sorted(entry.shape) else ""
    )
    return (
        f"the patch is for {source.name} as {source.dtype} of shape {source.shape}{turned}, "
        f"and here {here} is {dtype} of shape {shape}{hint}"
    )


def reversal(model: Any, patches: Sequence[Patch]) -> Patch:
    """What to apply to a model so that it is as before some patches, which all it holds now; checked to the bit.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> from elementgrad._train.api import reversal
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> before = model.weight.clone()
    >>> elements = eg.trainable(model, "weight[0, 1]")
    >>> with torch.no_grad():
    ...     _ = elements["weight[0, 1]"].fill_(7.0)
    >>> elements.save(path)
    >>> elements.release()
    >>> elsewhere = copy.deepcopy(model)  # which knows nothing of elements
    >>> _ = eg.apply(elsewhere, reversal(elsewhere, [eg.inspect(path)]))
    >>> torch.equal(elsewhere.weight, before)
    True
    """
    trainer = trainer_of(model)
    entries = [entry for patch in patches for entry in patch.entries]
    reverse = []
    for entry in entries:
        try:
            tensor = trainer.parameter(entry.name)
        except ElementgradError as error:
            raise PatchError(f"the patch does not fit: {error}") from None
        read = reader(trainer, tensor)
        dtype = trainer.bits(tensor, np.zeros(0, np.int64))[0]
        if (tuple(tensor.shape), dtype) != (entry.shape, entry.dtype):
            raise PatchError(
                f"the patch is for {entry.name} as {entry.dtype} of shape {entry.shape}, and here it is {dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        held = BitArray(dtype, read(entry.indices))
        if held != entry.values.rounded(dtype):
            raise PatchError(f"{entry.place} does not hold the values of the patch; there is nothing to undo")
        positions, bits = _before([other for other in entries if other.name == entry.name])
        if not fits(entry.fingerprint, entry.shape, dtype, read, positions=positions, bits=bits):
            raise PatchError(
                f"{entry.name} is not the tensor that the patch was made for: other elements of it differ; undo "
                "what was applied later first, or together with it"
            )
        known = fingerprint(entry.shape, dtype, read)
        reverse.append(replace(entry, values=entry.originals, originals=held, fingerprint=known))
    return Patch(tuple(reverse))


def _before(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Where entries change a tensor, and the bytes that stood there first."""
    positions, first = np.unique(np.concatenate([entry.indices for entry in entries]), return_index=True)
    return positions, np.concatenate([entry.originals.bits for entry in entries])[first]
