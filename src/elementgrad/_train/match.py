"""Matches a patch with a model: which elements it changes, and whether they still are as when it was made."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad._place.grammar import listed
from elementgrad._place.place import Place
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry, MappedEntry, Names, element_text, map_entries, place_label
from elementgrad._train.fingerprint import fingerprint, fits
from elementgrad._train.history import BitsAt, ReadBytes, are_among, first_bits
from elementgrad._train.patch import Patch
from elementgrad._train.routing import check_disjoint, resolve, trainer_of
from elementgrad._train.trainer import ResolvedPlace, Trainer, groups_by_tensor
from elementgrad._train.weights import Weights
from elementgrad.errors import DuplicateError, ElementgradError, PatchError


def match_patch(
    trainer: Trainer, patch: Patch, names: Names | None, overwrite: bool = False, resume: bool = False
) -> list[tuple[ResolvedPlace, Entry]]:
    """Find the elements that a patch changes, and check that all of it fits before anything is changed."""
    entries = map_entries(patch.entries, names)
    # Before any parameter is read: reading a sharded one needs all processes.
    trainer.check_same_on_all_ranks((one.entry.name, one.entry.indices, one.entry.values.bits) for one in entries)
    matches = [(_match_entry(trainer, one, overwrite, resume), one.entry) for one in entries]
    try:
        check_disjoint([target for target, _ in matches])  # tensors may be tied here that were not at the source
    except DuplicateError as error:
        raise PatchError(f"the patch does not fit: {error}") from None
    return matches


def _match_entry(trainer: Trainer, mapped: MappedEntry, overwrite: bool, resume: bool) -> ResolvedPlace:
    entry, source = mapped.entry, mapped.source
    source.require_applicable()
    try:
        tensor = trainer.parameter(entry.name)
    except ElementgradError as error:
        hint = "; names= says what it is called here" if entry.name == source.name else ""
        raise PatchError(f"the patch does not fit: {error}{hint}") from None
    trainer.check_parameter(tensor, entry.name)
    shape, dtype = tuple(tensor.shape), trainer.dtype_name(tensor)
    if (shape, dtype) != (entry.shape, entry.dtype):
        raise _shape_error(mapped, shape, dtype)
    target = ResolvedPlace(_place_in(trainer, mapped, tensor), entry.name, tensor, shape, entry.indices)
    require_idle(trainer, [target])
    if entry.name == source.name and entry.tied is not None:  # of models with other names, ties are not known
        _require_tied(trainer, tensor, entry.name, entry.tied)
    history, read = trainer.history(tensor), trainer.byte_reader(tensor)
    # The bytes in the order of the source, as a checksum of them depends on it.
    in_source_order = mapped.to_model(source.indices)
    now = read(in_source_order)
    if source.originals_match(now) and _fits(mapped, dtype, read, None):
        # Made for the tensor as it is now, whatever was changed before.
        return target if mapped.is_transposed else replace(target, current=source.originals or BitArray(dtype, now))
    earlier = history.find_overlap(entry.indices)
    is_same_place = resume and earlier is not None and np.array_equal(earlier.positions, entry.indices)
    if earlier is not None and not (overwrite or is_same_place):
        raise PatchError(
            f"{entry.label} overlaps {earlier.place}, which was changed before; undo that first, or give overwrite=True"
        )
    same = source.originals_match(history.bytes_before(in_source_order))
    if not same or not _fits(mapped, dtype, read, history.originals()):
        raise PatchError(
            f"{entry.name} is not the tensor that the patch was made for: "
            + ("other elements of it differ" if same else f"{entry.label} has other values there")
            + "; give the model as it was before training"
            + (", and the right order of axes" if mapped.is_transposed else "")
        )
    return target


def _place_in(trainer: Trainer, mapped: MappedEntry, tensor: Any) -> Place:
    """Return the place of an entry in a model, which may call a shared tensor by another of its names."""
    entry = mapped.entry
    if entry.is_scattered:
        return entry.where
    target = next(resolve(trainer, [entry.where]))
    if target.tensor is not tensor:
        raise PatchError(f"the patch takes {entry.label} for {entry.name}, and here it is another tensor")
    return target.place


def _fits(mapped: MappedEntry, dtype: str, read: ReadBytes, originals: BitsAt | None) -> bool:
    """Return True if the fingerprint of an entry is that of a tensor, of which some elements have these originals."""
    source = mapped.source
    known = None if originals is None else BitsAt(mapped.to_source(originals.positions), originals.bits)
    before = first_bits([source.since, known])
    return fits(source.fingerprint, source.shape, dtype, lambda some: read(mapped.to_model(some)), before)


def _require_tied(trainer: Trainer, tensor: Any, name: str, tied_in_patch: Sequence[str]) -> None:
    """Raise a `PatchError` if a tensor has other names than at the source, so that too much or too little changes."""
    every = list(trainer.named_parameters())
    known = {spelling for other in tied_in_patch for spelling in (other, trainer.stable_name(other))}
    stable = trainer.stable_name(name)
    tied_here = [other for other, parameter in every if parameter is tensor and trainer.stable_name(other) != stable]
    apart = [other for other, parameter in every if other in tied_in_patch and parameter is not tensor]
    if apart:
        raise PatchError(
            f"the patch was made where {name} and {listed(apart)} are one tensor, and here they are not: it would "
            "change only one of them; tie them first, or leave all but one out of a file"
        )
    surplus = [other for other in tied_here if known.isdisjoint((other, trainer.stable_name(other)))]
    if surplus:
        raise PatchError(
            f"{name} and {listed(surplus)} are one tensor here, and were not where the patch was made: it would change "
            "both; give the model as it was"
        )


def _shape_error(mapped: MappedEntry, shape: tuple[int, ...], dtype: str) -> PatchError:
    entry, source = mapped.entry, mapped.source
    transposed = f", which axes {mapped.axes} make {entry.shape}" if mapped.is_transposed else ""
    here = "it" if entry.name == source.name else entry.name
    is_permutation = shape != entry.shape and sorted(shape) == sorted(entry.shape)
    hint = "; names= takes the order of its axes" if is_permutation else ""
    return PatchError(
        f"the patch is for {source.name} as {source.dtype} of shape {source.shape}{transposed}, "
        f"and here {here} is {dtype} of shape {shape}{hint}"
    )


def require_idle(trainer: Trainer, targets: Sequence[ResolvedPlace]) -> None:
    for same in groups_by_tensor(targets):
        groups = trainer.groups_of(same[0].tensor)
        training = np.concatenate([np.zeros(0, np.int64), *[group.positions for group in groups]])
        wanted = np.concatenate([target.positions for target in same])
        for twice in wanted[are_among(wanted, training)][:1]:
            place = next(target.place for target in same if twice in target.positions)
            which = element_text(same[0].name, same[0].shape, twice)
            raise DuplicateError(f"{which} of {place_label(place)} trains already; release those elements first")


def reverse_patch(model: Any, patches: Sequence[Patch]) -> Patch:
    """Return the patch that takes patches back out of a model, which must hold the values of all of them, to the bit.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> from elementgrad._train.match import reverse_patch
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> before = model.weight.clone()
    >>> elements = eg.trainable(model, "weight[0, 1]")
    >>> with torch.no_grad():
    ...     _ = elements["weight[0, 1]"].fill_(7.0)
    >>> elements.save(path)
    >>> elements.release()
    >>> elsewhere = copy.deepcopy(model)  # a model without a history
    >>> _ = eg.apply(elsewhere, reverse_patch(elsewhere, [eg.inspect(path)]))
    >>> torch.equal(elsewhere.weight, before)
    True
    """
    trainer = trainer_of(model)
    entries = [entry for patch in patches for entry in patch.entries]
    reverse = []
    for entry in entries:
        originals = entry.require_originals("taking it back")
        try:
            tensor = trainer.parameter(entry.name)
        except ElementgradError as error:
            raise PatchError(f"the patch does not fit: {error}") from None
        read = trainer.byte_reader(tensor)
        dtype = trainer.dtype_name(tensor)
        if (tuple(tensor.shape), dtype) != (entry.shape, entry.dtype):
            raise PatchError(
                f"the patch is for {entry.name} as {entry.dtype} of shape {entry.shape}, and here it is {dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        values = BitArray(dtype, read(entry.indices))
        if values != entry.values.round_to(dtype):
            raise PatchError(f"{entry.label} does not hold the values of the patch; there is nothing to undo")
        same = [other for other in entries if other.name == entry.name]
        known = [BitsAt(other.indices, other.require_originals("taking it back").bits) for other in same]
        if not fits(entry.fingerprint, entry.shape, dtype, read, first_bits([entry.since, *known])):
            raise PatchError(
                f"{entry.name} is not the tensor that the patch was made for: other elements of it differ; undo "
                "what was applied later first, or together with it"
            )
        mark = fingerprint(entry.shape, dtype, read)
        reverse.append(replace(entry, values=originals, originals=values, fingerprint=mark, since=None))
    return Patch(tuple(reverse))


def patch_state(weights: Weights, patch: Patch) -> tuple[str, str | None]:
    """Return whether a patch fits weights, is applied to them or does not fit, and then why."""
    try:
        match_patch(trainer_of(weights), patch, None)
        return "fits", None
    except PatchError as error:
        with suppress(PatchError):
            reverse_patch(weights, [patch])
            return "is applied", None
        return "does not fit", str(error)
