"""`trainable` and `apply`: how elements of a model come to train, and how a patch comes into a model."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from elementgrad.backends import uncompiled
from elementgrad.backends.training import FunctionalTrainer, Trainer
from elementgrad.cleanup import committed, defer
from elementgrad.errors import DuplicateError, ElementgradError, OptionError, PatchError
from elementgrad.place import Place
from elementgrad.text import listed
from elementgrad.train.apart import element
from elementgrad.train.elements import Elements, Member, reader
from elementgrad.train.fingerprint import fits
from elementgrad.train.keeping import Keep, spared
from elementgrad.train.ledger import Ledger, Mark
from elementgrad.train.mapping import Mapped, Names, mapped
from elementgrad.train.named import Named, all_named, named, require_disjoint, trainer_of
from elementgrad.train.patch import Entry, Patch

ENDING = ".safetensors"
Model = Any


@committed
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
        trainer.agree((one.name, one.positions) for one in every)
        parts = [trainer.part(one.tensor, one.positions, kept) for one in every]
    beside = spared(trainer, keep, every)
    defer(trainer.cancel, parts)
    trainer.start(parts, beside)
    members = [_member(trainer, one, part) for one, part in zip(every, parts, strict=True)]
    return Elements(trainer, members, training=True)


@committed
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


def _member(trainer: Trainer, one: Named, part: Any) -> Member:
    mark = part.mark = Mark(str(one.place), one.positions, trainer.bits(part.originals)[1])
    if not isinstance(trainer, FunctionalTrainer):  # where nothing is written to, nothing is to be noted
        ledger = Ledger(one.tensor, reader(trainer, one.tensor))
        defer(ledger.remove, mark)
        ledger.add(mark)
    return Member(one.place, one.name, one.tensor, one.shape, one.positions, part, mark)


def _agree_on(trainer: Trainer, entries: Sequence[Mapped]) -> None:
    """Before anything is read that other processes may have."""
    trainer.agree((one.entry.name, one.entry.indices, one.entry.values.bits) for one in entries)


def _require_idle(trainer: Trainer, one: Named) -> None:
    for part in trainer.training(one.tensor):
        for twice in one.positions[np.isin(one.positions, part.positions)][:1]:
            which = element(one.name, one.shape, twice)
            raise DuplicateError(f"{which} of {one.place} trains already; release those elements first")


def _fitting(
    trainer: Trainer, entries: Sequence[Mapped], overwrite: bool = False, resume: bool = False
) -> list[tuple[Named, Entry]]:
    """The parameters that a patch is for, each checked before anything is changed."""
    found = [(_fitted(trainer, one, overwrite, resume), one.entry) for one in entries]
    try:
        require_disjoint([one for one, _ in found])  # names that are tied here may not be where the patch was made
    except DuplicateError as error:
        raise PatchError(f"the patch does not fit: {error}") from None
    return found


def _fitted(trainer: Trainer, given: Mapped, overwrite: bool, resume: bool) -> Named:
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
    ledger = Ledger(trainer.lasting(tensor), read)
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


def _unlike(given: Mapped, shape: tuple[int, ...], dtype: str) -> str:
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
